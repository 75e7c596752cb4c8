"""Pictures: the text to the letter, the SVG and the trace as what their readers take them for."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from parallel3d.schedules.build import build_schedule
from parallel3d.timeline.draw import draw_svg, draw_text, draw_trace
from parallel3d.timeline.simulate import EQUAL, ActionTimes, StageTimes, simulate
from parallel3d.timeline.spans import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def simulated(times: StageTimes = EQUAL) -> Timeline:
    schedule = build_schedule("1f1b", pp=2, microbatches=3)
    return simulate(schedule, ActionTimes.uniform(schedule.stages, times))


@pytest.mark.parametrize("width", [0, 33, 200])
@pytest.mark.parametrize(
    "times",
    [
        StageTimes(),
        StageTimes(forward=1.5),
        StageTimes(forward=0.37, input=1.21),
    ],
)
def test_text_keeps_to_its_width(width: int, times: StageTimes) -> None:
    lines = draw_text(simulated(times=times), width=width).splitlines()
    bars = [line for line in lines if line.startswith("rank")]
    assert len(bars) == 2
    assert max(map(len, bars)) <= max(width, 28)
    assert draw_text(simulated(times=times), width=width).isascii()


def test_svg_is_one_file_with_a_bar_and_a_tooltip_for_each_action() -> None:
    timeline = simulated()
    text = draw_svg(timeline, width=800)
    root = ElementTree.fromstring(text)
    bars = [group for group in root.iter(f"{SVG}g") if group.get("class") == "bar"]
    assert len(bars) == len(timeline.spans)
    assert bars[0].findtext(f"{SVG}title") == "0F0 on rank 0: 0 to 1"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_svg_escapes_what_a_user_named() -> None:
    odd = replace(simulated(), name="<a & b>.csv")
    titles = [title.text for title in ElementTree.fromstring(draw_svg(odd)).iter(f"{SVG}title")]
    assert titles[0] == "<a & b>.csv: makespan 12, bubble 25.0%"


def test_trace_has_a_process_for_each_timeline_and_a_thread_for_each_rank() -> None:
    trace = json.loads(draw_trace(simulated(), replace(simulated(), name="step 7")))
    names = [
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    ]
    assert names == [
        "1f1b: makespan 12, bubble 25.0%",
        "step 7: makespan 12, bubble 25.0%",
    ]
    done = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in done} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert done[0] == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "name": "0F0",
        "cat": "forward",
        "ts": 0.0,
        "dur": 1e6,
        "args": {"stage": 0, "microbatch": 0},
    }
    assert min(event["ts"] for event in done) == 0

"""Pictures: the text to the letter, the SVG and the trace as what their readers take them for."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName
from parallel3d.schedules.schedule import Action, Kind
from parallel3d.timeline.draw import draw_trace
from parallel3d.timeline.simulate import EQUAL, ActionTimes, StageTimes, simulate
from parallel3d.timeline.spans import Span, Timeline
from parallel3d.timeline.svg import draw_svg
from parallel3d.timeline.text import draw_text

SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: ScheduleName = "1f1b", times: StageTimes = EQUAL, virtual_stages: int = 1) -> Timeline:
    schedule = build_schedule(name, pp=2, microbatches=3, virtual_stages=virtual_stages)
    return simulate(schedule, ActionTimes.uniform(schedule.stages, times))


def measured() -> Timeline:
    """Returns the simulation as if it began at another time and each action took a little longer."""
    spans = tuple(Span(s.rank, s.action, 50 + s.start_s * 1.07, 50 + s.end_s * 1.07) for s in simulated().spans)
    return Timeline(name="step 7, measured", ranks=2, stages=2, spans=spans)


def test_text_has_a_column_for_each_character_of_a_steps_longest_name() -> None:
    assert draw_text(simulated()) == (
        "1f1b: makespan 12, bubble 25.0%\n"
        "rank 0 |F0 F1 ......B0--- F2 B1--- ...B2---\n"
        "rank 1 |...F0 B0--- F1 B1--- F2 B2--- ......\n"
        "F forward, B backward, . idle (F0: forward, microbatch 0)\n"
    )


def test_text_names_the_stage_where_a_rank_has_several_and_there_is_room() -> None:
    text = draw_text(simulated("zb_v", virtual_stages=2), width=120)
    assert text.splitlines()[1].startswith("rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 ")
    assert text.endswith("(2F0: stage 2, forward, microbatch 0)\n")


def test_text_has_small_letters_for_second_stages_where_there_is_less_room() -> None:
    text = draw_text(simulated("zb_v", virtual_stages=2), width=70)
    assert text.splitlines()[1].startswith("rank 0 |F0 F1 F2 f0 i0 w0 f1 ")
    assert text.endswith("(F0: forward, microbatch 0; in small letters for a rank's second stage)\n")


@pytest.mark.parametrize("width", [0, 30, 33, 50, 80, 200])
@pytest.mark.parametrize("times", [StageTimes(), StageTimes(forward=1.5), StageTimes(forward=0.37, input=1.21)])
def test_text_keeps_to_its_width(width: int, times: StageTimes) -> None:
    lines = draw_text(simulated(times=times), measured(), width=width).splitlines()
    bars = [line for line in lines if line.startswith("rank")]
    assert len(bars) == 4
    assert max(map(len, bars)) <= max(width, 28)
    assert draw_text(simulated(times=times), width=width).isascii()


def test_text_in_color_says_the_same() -> None:
    colored = draw_text(simulated("interleaved_1f1b", virtual_stages=2), color=True)
    plain = draw_text(simulated("interleaved_1f1b", virtual_stages=2))
    without = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    rows = [re.sub(r"[-. ]+", " ", line).strip() for line in plain.splitlines() if line.startswith("rank")]
    assert [re.sub(r"[ ]+", " ", line).strip() for line in without.splitlines() if line.startswith("rank")] == rows
    assert "\x1b[30;48;5;68m0F0\x1b[0m" in colored and "\x1b[30;48;5;110m2F0\x1b[0m" in colored


def test_a_measured_run_stands_below_its_simulation_on_the_same_scale() -> None:
    lines = draw_text(simulated(), measured(), width=90).splitlines()
    assert lines[3].startswith("step 7, measured: makespan 12.84, bubble 25.0%")
    assert len(lines[2].rstrip(".")) < len(lines[5].rstrip("."))


def test_text_of_nothing_is_a_page_all_the_same() -> None:
    nothing = Timeline(name="nothing", ranks=1, stages=1, spans=())
    instant = Timeline(name="instant", ranks=1, stages=1, spans=(Span(0, Action(0, Kind.FORWARD, 0), 0.0, 0.0),))
    for drawn in (draw_text(nothing), draw_text(instant), draw_text()):
        assert drawn
    assert "nothing" in draw_svg(nothing) and "instant" in draw_svg(instant)
    assert json.loads(draw_trace())["traceEvents"] == []


def test_svg_is_one_file_with_a_bar_and_a_tooltip_for_each_action() -> None:
    both = [simulated(), measured()]
    text = draw_svg(*both, width=800)
    root = ElementTree.fromstring(text)
    bars = [group for group in root.iter(f"{SVG}g") if group.get("class") == "bar"]
    assert len(bars) == sum(len(timeline.spans) for timeline in both)
    assert bars[0].findtext(f"{SVG}title") == "0F0 on rank 0: 0 to 1"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for bar in bars:
        rect = bar.find(f"{SVG}rect")
        assert rect is not None
        assert 0 <= float(rect.get("x", "")) <= float(rect.get("x", "")) + float(rect.get("width", "")) <= 800


def test_svg_escapes_what_a_user_named() -> None:
    odd = Timeline(name="<a & b>.csv", ranks=2, stages=2, spans=simulated().spans)
    titles = [title.text for title in ElementTree.fromstring(draw_svg(odd)).iter(f"{SVG}title")]
    assert titles[0] == "<a & b>.csv: makespan 12, bubble 25.0%"


def test_trace_has_a_process_for_each_timeline_and_a_thread_for_each_rank() -> None:
    trace = json.loads(draw_trace(simulated(), measured()))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["1f1b: makespan 12, bubble 25.0%", "step 7, measured: makespan 12.84, bubble 25.0%"]
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

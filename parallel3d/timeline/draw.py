"""What the pictures of timelines share, the colours and words of actions and the headline, and the
Chrome trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from parallel3d.schedules.schedule import Kind
from parallel3d.timeline.spans import Timeline


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a kind of action is shown: a word and two colours. A rank's first, third, ... stages have
    the first colour and its other stages the second."""

    word: str
    rgb: tuple[str, str]


LOOKS = {
    Kind.FORWARD: Look(word="forward", rgb=("#4c78c8", "#8fb0e8")),
    Kind.BACKWARD: Look(word="backward", rgb=("#3f9a5f", "#86c79b")),
    Kind.INPUT: Look(word="input's gradient", rgb=("#2f9aa0", "#7fcacd")),
    Kind.WEIGHT: Look(word="weights' gradient", rgb=("#d09a35", "#e8c583")),
}


def chunks(timeline: Timeline) -> dict[int, int]:
    """Returns for each stage which of its rank's stages it is, from 0 in the order of the model."""
    found: dict[int, int] = {}
    for spans in timeline.by_rank:
        for chunk, stage in enumerate(sorted({span.action.stage for span in spans})):
            found[stage] = chunk
    return found


def kinds(timeline: Timeline) -> list[Kind]:
    """Returns the kinds of actions that occur, in the order of the legend."""
    there = {span.action.kind for span in timeline.spans}
    return [kind for kind in LOOKS if kind in there]


def headline(timeline: Timeline) -> str:
    return (
        f"{timeline.name}: makespan {timeline.makespan_s:.6g}, bubble "
        f"{100 * timeline.bubble_fraction:.1f}%"
    )


def draw_trace(*timelines: Timeline) -> str:
    """Draws a Chrome trace (Google's "Trace Event Format"), which https://ui.perfetto.dev and
    chrome://tracing open. It has a process for each timeline and a thread for each rank, and each
    timeline begins at 0, so that a measured one can be compared with its simulation. A unit of
    simulated time is shown as a second."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        names = [("process_name", 0, headline(timeline))]
        names += [("thread_name", rank, f"rank {rank}") for rank in range(timeline.ranks)]
        events += [
            {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
            for what, thread, name in names
        ]
        events += [
            {
                "ph": "X",
                "pid": process,
                "tid": span.rank,
                "name": str(span.action),
                "cat": LOOKS[span.action.kind].word,
                "ts": (span.start_s - timeline.start_s) * 1e6,  # in microseconds, as `dur`
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            for spans in timeline.by_rank
            for span in spans
        ]
    return (
        json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"
    )

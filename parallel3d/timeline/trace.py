"""A timeline as a Chrome trace: opens in https://ui.perfetto.dev and chrome://tracing. One process a timeline, one
thread a rank; the format is Google's "Trace Event Format"."""

from __future__ import annotations

import json
from typing import Any

from parallel3d.timeline.draw import LOOKS, headline
from parallel3d.timeline.spans import Timeline

_MICROSECONDS = 1e6


def draw_trace(*timelines: Timeline) -> str:
    """JSON; a unit of simulated time is shown as a second."""
    events = [event for process, timeline in enumerate(timelines) for event in _events(process, timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _events(process: int, timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [_named("process_name", process, 0, headline(timeline))]
    for rank, spans in enumerate(timeline.by_rank):
        events.append(_named("thread_name", process, rank, f"rank {rank}"))
        events += [
            {
                "ph": "X",
                "pid": process,
                "tid": rank,
                "name": str(span.action),
                "cat": LOOKS[span.action.kind].word,
                "ts": (span.start_s - timeline.start_s) * _MICROSECONDS,
                "dur": (span.end_s - span.start_s) * _MICROSECONDS,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            for span in spans
        ]
    return events


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}

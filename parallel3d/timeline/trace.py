"""Reads the Chrome traces that `draw_trace` writes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from parallel3d.schedules.schedule import Action, Kind
from parallel3d.timeline.spans import Span, Timeline

_NAME = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")  # An action, such as 2F0.
_MOST_RANKS = 4096


def read_trace(path: Path) -> list[Timeline]:
    """Returns the timelines of a trace in their order. Their times are in seconds.

    Raises OSError if the file cannot be read, and ValueError if it is not such a trace.
    """
    names: defaultdict[int, str] = defaultdict(str)
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    try:
        for event in json.loads(path.read_bytes())["traceEvents"]:
            process = event["pid"]
            rank = int(event["tid"])
            if event["name"] == "process_name":
                names[process] = str(event["args"]["name"]).partition(": makespan")[0]
            elif event["ph"] == "X" and (found := _NAME.fullmatch(event["name"])):
                if rank not in range(_MOST_RANKS):
                    raise ValueError(f"rank {rank}")
                action = Action(int(found[1]), Kind(found[2]), int(found[3]))
                start_s = event["ts"] / 1e6
                end_s = start_s + event["dur"] / 1e6
                spans[process].append(Span(rank, action, start_s, end_s))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path}: not a trace of pipelines: {error!r}") from error
    timelines = []
    for process, found_spans in spans.items():
        timelines.append(
            Timeline(
                name=names[process],
                ranks=1 + max(span.rank for span in found_spans),
                spans=tuple(found_spans),
            )
        )
    return timelines


def slowest_and_simulated(path: Path) -> list[Timeline]:
    """Returns two timelines of the trace of a training step: the slowest pipeline, and the
    simulation. Raises as `read_trace`."""
    *measured, simulated = read_trace(path)
    return [max(measured, key=lambda timeline: timeline.makespan_s), simulated]

"""The times of a run's actions as they are on this rank's device."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallel3d.schedules.schedule import Action
from parallel3d.timeline.spans import Span


class Recorder:
    """Collects (action, start, end) of what a rank computes, without its waits for other ranks. On
    a GPU the times come from events in the stream, so that recording makes nothing wait."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        self._origin = self.now()
        if self._events:
            torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def now(self) -> Any:
        """Returns a mark of this moment: seconds, or an event in the current stream."""
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, action: Action, start: Any, end: Any) -> None:
        self._marks.append((action, start, end))

    def spans(self, rank: int, since_s: float = 0.0) -> list[Span]:
        """Returns what was recorded as spans of `rank`, in seconds after `since_s` on this host's
        clock, `time.perf_counter`."""

        def seconds(mark: Any) -> float:
            if not self._events:
                return float(mark) - since_s
            mark.synchronize()
            return self._origin_s - since_s + float(self._origin.elapsed_time(mark)) / 1000

        return [
            Span(rank, action, seconds(start), seconds(end)) for action, start, end in self._marks
        ]

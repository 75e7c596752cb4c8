"""The times of a run's actions as they are on this rank's device."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallel3d.schedules.schedule import Action
from parallel3d.timeline.spans import Span


class Recorder:
    """Collects (action, start, end) of what a rank computes, without what it waits for others. On a GPU the times are
    the stream's own, by events, so that recording makes nobody wait."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._marks: list[tuple[Action, Any, Any]] = []
        self._origin = self.now()
        if self._events:
            torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def now(self) -> Any:
        """A mark: seconds, or an event in the current stream."""
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, action: Action, start: Any, end: Any) -> None:
        self._marks.append((action, start, end))

    def spans(self, rank: int) -> list[Span]:
        """In seconds on this host's clock, `time.perf_counter`."""
        return [Span(rank, action, self._s(start), self._s(end)) for action, start, end in self._marks]

    def _s(self, mark: Any) -> float:
        if not self._events:
            return float(mark)
        mark.synchronize()
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1000

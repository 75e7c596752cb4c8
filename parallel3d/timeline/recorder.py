"""Records the start and end of actions on a rank's device."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallel3d.schedules.schedule import Action
from parallel3d.timeline.spans import Span


class CudaEvents:
    """Events with times in the current CUDA stream."""

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000


class Recorder:
    """Collects (action, start, end) of a rank's computation, without its waits for other ranks.

    On GPUs the times come from CUDA events, so that recording does not synchronize.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = CudaEvents() if device.type == "cuda" else None
        self._marks: list[tuple[Action, Any, Any]] = []
        self._origin = self.now()
        if self._events is not None:
            torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def now(self) -> Any:
        """Returns the current time in seconds, or a CUDA event in the current stream."""
        return time.perf_counter() if self._events is None else self._events.record()

    def add(self, action: Action, start: Any, end: Any) -> None:
        self._marks.append((action, start, end))

    def spans(self, rank: int, since_s: float = 0.0) -> list[Span]:
        """Returns the recorded spans, labeled with `rank`. On GPUs, waits for the actions to end.

        Times are in seconds after `since_s`, a value of `time.perf_counter` on this host.
        """

        def seconds(mark: Any) -> float:
            if self._events is None:
                return float(mark) - since_s
            mark.synchronize()
            return self._origin_s - since_s + self._events.elapsed_s(self._origin, mark)

        return [
            Span(rank, action, seconds(start), seconds(end)) for action, start, end in self._marks
        ]

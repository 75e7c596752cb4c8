"""The clock of a device, by which benchmarks, calibration and the acceptance on a GPU time what
they run. torch is imported by the function that needs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceClock:
    """Times what a device does. On a CPU it reads the host's clock. On a GPU it puts events into
    the stream, so that the times are those of the stream, and nothing waits before both events have
    passed."""

    device: torch.device

    def mark(self) -> Any:
        """Returns a mark of this moment: seconds, or an event in the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds from one mark to a later one. On a GPU it waits until the later one
        has passed."""
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def seconds(
        self,
        work: Callable[[], object],
        calls: int = 1,
        *,
        ahead: Callable[[], object] | None = None,
    ) -> float:
        """Returns the seconds of a call, the mean of `calls` of them. `ahead` is called before the
        clock starts: work that keeps a GPU busy while the host dispatches the calls, whose kernels
        are then timed without gaps."""
        if ahead is not None:
            ahead()
        start = self.mark()
        for _ in range(calls):
            work()
        return self.seconds_between(start, self.mark()) / calls

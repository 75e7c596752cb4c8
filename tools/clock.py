"""Timing of work on a device, for benchmarks, calibration and GPU tests. Functions import torch
when they need it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceClock:
    """Measures time on a device: with the host clock on CPUs, with CUDA events on GPUs. The host
    waits only when an elapsed time is read.
    """

    device: torch.device

    def mark(self) -> Any:
        """Returns a time mark: seconds on a CPU, an event in the current stream on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks. On a GPU it waits for the later one."""
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
        """Returns the mean seconds per call of `work`, over `calls` calls.

        `ahead` is called before the clock starts. It keeps a GPU busy while the host dispatches the
        calls, so that their kernels are timed without gaps."""
        if ahead is not None:
            ahead()
        start = self.mark()
        for _ in range(calls):
            work()
        return self.seconds_between(start, self.mark()) / calls

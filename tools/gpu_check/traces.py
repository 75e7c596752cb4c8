"""What a GPU ran, from the profiler: kernels with their streams and times. On a CPU operators stand for them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Kernel:
    """One kernel, in microseconds."""

    name: str
    stream: int
    start: float
    end: float

    @property
    def is_collective(self) -> bool:
        return "nccl" in self.name.lower()


def kernels_of(work: Callable[[], object], device: str) -> list[Kernel]:
    """Returns the kernels that `work` ran, in the order of their starts."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as recorded:
            work()
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return kernels_among(events, "kernel" if device == "cuda" else "cpu_op")


def kernels_among(events: Iterable[dict[str, Any]], category: str) -> list[Kernel]:
    """Returns the kernels (or operators) among the events of a trace."""
    found = [
        Kernel(event["name"], int(event.get("args", {}).get("stream", 0)), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == category and event.get("ph") == "X"
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def overlapped(kernels: Sequence[Kernel]) -> tuple[int, int, float]:
    """Returns how many collectives there were, how many of them ran at the same time as other kernels of another
    stream, and for which share of all their time."""
    collectives = [kernel for kernel in kernels if kernel.is_collective]
    others = [kernel for kernel in kernels if not kernel.is_collective]
    beside, shared, total = 0, 0.0, 0.0
    for one in collectives:
        times = [min(one.end, k.end) - max(one.start, k.start) for k in others if k.stream != one.stream]
        together = sum(time for time in times if time > 0)  # kernels of one stream follow each other
        beside += together > 0
        shared += together
        total += one.end - one.start
    return len(collectives), beside, shared / total if total else 0.0

"""Finds the rank that the others wait for.

All ranks of a step take the same time, because they wait for each other. What tells them apart is the time in which a
rank had work to do: in which its main thread ran, or could have run and waited for a processor, as Linux counts it for
each thread. A thread that waits for its peers sleeps. So a rank stands out whose processor is slow, or is taken by
other programs; and so does one that waits for its data, whose waits are added. On a GPU the host's thread waits for the
device at full speed, and nothing can be told.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig

WARN_RATIO, WARN_LINES = 1.5, 3  # a rank is warned of that is so slow in so many lines of metrics in a row
_SCHEDULE = Path("/proc/thread-self/schedstat")  # nanoseconds that a thread ran, and that it waited for a processor


def work_clock(device: torch.device) -> Callable[[], float]:
    """Returns a function that gives the seconds for which the thread that asks for it now has had work: NaN where that
    is not known, which is on GPUs and where the kernel does not count it."""
    if device.type != "cpu" or not _SCHEDULE.exists():
        return lambda: math.nan

    def read() -> float:
        ran_ns, waited_ns, _ = _SCHEDULE.read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9

    return read


@dataclass(frozen=True)
class Slowest:
    """The rank whose own work takes longest, and how many times that of the median of its peers."""

    rank: int
    ratio: float


class Stragglers:
    """Sees the times of all ranks' own work at each line of metrics. The peers of a rank are those that hold the same
    stages, because stages may have unequal work; where a stage is on one rank alone, its peers are all ranks, and no
    warning is given."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._rank, self._lines = -1, 0

    def see(self, seconds: Sequence[float]) -> tuple[Slowest | None, str | None]:
        """Returns the slowest rank, and a warning where it has been much slower than its peers for some lines. Every
        rank calls it, with the times of all ranks."""
        if len(seconds) < 2 or not all(math.isfinite(own) and own > 0 for own in seconds):
            return None, None
        each = len(seconds) // self._parallel.pp  # ranks that hold the same stages, which are neighbours
        peers = [seconds[first : first + each] if each > 1 else seconds for first in range(0, len(seconds), each)]
        ratios = [own / median_low(peers[rank // each]) for rank, own in enumerate(seconds)]
        slowest = Slowest(ratios.index(max(ratios)), max(ratios))
        is_slow = each > 1 and slowest.ratio >= WARN_RATIO
        self._lines = (self._lines + 1 if slowest.rank == self._rank else 1) if is_slow else 0
        self._rank = slowest.rank
        if self._lines != WARN_LINES:
            return slowest, None
        host = [socket.gethostname()]
        dist.broadcast_object_list(host, src=slowest.rank)
        return slowest, (
            f"rank {slowest.rank} ({host[0]}, {self._parallel.coordinates(slowest.rank)}) is slow: its own work takes "
            f"{slowest.ratio:.1f} times that of its peers' median, in {WARN_LINES} lines in a row, and all wait for it"
        )

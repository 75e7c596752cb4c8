"""Finds the rank that the others wait for.

All ranks of a step take the same time, because they wait for each other. What tells them apart is
the time in which a rank had work to do: in which its main thread ran, or could have run and waited
for a processor, as Linux counts it for each thread. A thread that waits for its peers sleeps. So a
rank stands out whose processor is slow, or is taken by other programs; and so does one that waits
for its data, whose waits are added. On a GPU the host's thread waits for the device at full speed,
and nothing can be told.

Ranks that hold the same stages have the same work, and their times are compared. A stage that one
rank holds alone has no such peer, and may have more work than others: there the time of a rank's
work is set against the part of it that its thread ran. So a rank that gets too little of a
processor or waits for its data is told; one whose processor itself is slow has only a stage that
takes long.
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

WARN_RATIO = 1.5  # a rank is warned of that is so slow ...
# ... in the sum of at least so many steps, and so often in a row: within 20 steps
WARN_STEPS, WARN_TIMES = 7, 2
# nanoseconds that a thread ran, and that it waited for a processor
_SCHEDULE = Path("/proc/thread-self/schedstat")


def work_clock(device: torch.device) -> Callable[[], float]:
    """Returns a function that gives the seconds for which the thread that asks for it now has had
    work: NaN where that is not known, which is on GPUs and where the kernel does not count it."""
    if device.type != "cpu" or not _SCHEDULE.exists():
        return lambda: math.nan

    def read() -> float:
        ran_ns, waited_ns, _ = _SCHEDULE.read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9

    return read


@dataclass(frozen=True)
class OwnTime:
    """The seconds of a rank's own work, and those of them for which its thread ran."""

    work_s: float
    ran_s: float

    def __add__(self, other: OwnTime) -> OwnTime:
        return OwnTime(self.work_s + other.work_s, self.ran_s + other.ran_s)


@dataclass(frozen=True)
class Slowest:
    """The rank whose own work takes longest, and how many times that of the median of its peers."""

    rank: int
    ratio: float


class Stragglers:
    """Sees the times of all ranks' own work at each line of metrics. The peers of a rank are those
    that hold the same stages, and all ranks where a stage is on one rank alone. A warning goes by
    sums over many steps, so that a moment of other work does not count."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._are_alone = parallel.world_size == parallel.pp  # each with its stages
        # since the ranks were last judged
        self._sums, self._steps = [OwnTime(0.0, 0.0)] * parallel.world_size, 0
        # the rank that was slowest then, and how often in a row it was too slow
        self._suspect, self._times = -1, 0

    def see(self, times: Sequence[OwnTime], steps: int) -> tuple[Slowest | None, str | None]:
        """Returns the slowest rank, and a warning where it has been much slower than its peers for
        long enough. Every rank calls it, with the times of all ranks in so many steps."""
        if len(times) < 2 or not all(own.work_s < math.inf and own.ran_s > 0 for own in times):
            return None, None
        self._sums = [total + own for total, own in zip(self._sums, times, strict=True)]
        self._steps += steps
        warning = None
        if self._steps >= WARN_STEPS:
            found = self._slowest(self._sums)
            self._times = (self._times + 1 if found.rank == self._suspect else 1) * (
                found.ratio >= WARN_RATIO
            )
            self._suspect, self._sums, self._steps = found.rank, [OwnTime(0.0, 0.0)] * len(times), 0
            if self._times == WARN_TIMES:
                warning = self._warning(found)
        return self._slowest(times), warning

    def _slowest(self, times: Sequence[OwnTime]) -> Slowest:
        # so many neighbours are peers
        each = len(times) if self._are_alone else len(times) // self._parallel.pp
        slowness = [own.work_s / own.ran_s if self._are_alone else own.work_s for own in times]
        ratios = [
            own / median_low(slowness[rank // each * each :][:each])
            for rank, own in enumerate(slowness)
        ]
        return Slowest(ratios.index(max(ratios)), max(ratios))

    def _warning(self, found: Slowest) -> str:
        host = [socket.gethostname()]
        dist.broadcast_object_list(host, src=found.rank)
        place = f"rank {found.rank} ({host[0]}, {self._parallel.coordinates(found.rank)})"
        per = ", each per second of processor time" * self._are_alone
        times = f"its work takes {found.ratio:.1f} times that of its peers' median"
        return f"{place} is slow: {times}{per}, and all wait for it"

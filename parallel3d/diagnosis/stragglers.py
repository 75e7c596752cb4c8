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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

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


class Slowest(NamedTuple):
    """The rank whose own work takes longest, and how many times that of the median of its peers;
    None where it is not known."""

    rank: int | None = None
    ratio: float | None = None


class Stragglers:
    """Sees the times of all ranks' own work at each line of metrics. The peers of a rank are those
    that hold the same stages, and all ranks where a stage is on one rank alone. A warning goes by
    sums over many steps, so that a moment of other work does not count."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._are_alone = parallel.world_size == parallel.pp  # each with its stages
        # since the ranks were last judged
        self._sums, self._steps = np.zeros((2, parallel.world_size)), 0
        # the rank that was slowest then, and how often in a row it was too slow
        self._suspect, self._times = -1, 0

    def see(
        self, work_s: Sequence[float], ran_s: Sequence[float], steps: int
    ) -> tuple[Slowest, str | None]:
        """Returns the slowest rank, and a warning if it has been much slower than its peers for
        long enough. Every rank calls it, with the seconds of every rank's own work in the last
        `steps` steps, and those of them for which its thread ran."""
        times = np.array([work_s, ran_s])
        is_known = np.isfinite(times).all() and (times > 0).all()
        if len(work_s) < 2 or not is_known:
            return Slowest(), None
        self._sums += times
        self._steps += steps
        warning = None
        if self._steps >= WARN_STEPS:
            rank, ratio = self._slowest(self._sums)
            self._times = self._times + 1 if rank == self._suspect else 1
            if ratio < WARN_RATIO:
                self._times = 0
            self._suspect, self._sums, self._steps = rank, np.zeros_like(times), 0
            if self._times == WARN_TIMES:
                warning = self._warning(rank, ratio)
        return Slowest(*self._slowest(times)), warning

    def _slowest(self, times: NDArray[np.float64]) -> tuple[int, float]:
        """Returns the slowest rank and its ratio to the lower median of its peers."""
        stages = 1 if self._are_alone else self._parallel.pp
        work_s, ran_s = times
        slowness = work_s / ran_s if self._are_alone else work_s
        by_stage = slowness.reshape(stages, -1)  # ranks of the same stages are neighbours
        middle = (by_stage.shape[1] - 1) // 2
        medians = np.sort(by_stage, axis=1)[:, middle, None]
        ratios = (by_stage / medians).ravel()
        rank = int(ratios.argmax())
        return rank, float(ratios[rank])

    def _warning(self, rank: int, ratio: float) -> str:
        host = [socket.gethostname()]
        dist.broadcast_object_list(host, src=rank)
        place = f"rank {rank} ({host[0]}, {self._parallel.coordinates(rank)})"
        per = ", each per second of processor time" if self._are_alone else ""
        times = f"its work takes {ratio:.1f} times that of its peers' median"
        return f"{place} is slow: {times}{per}, and all wait for it"

"""What `parallel3d-plan calibrate` has measured on one host, the section `measured` of a hardware
file: curves of kernels and collectives, and what this project's own framework adds to them. All
seconds are those of a process that has a core (or a GPU) to itself; `time.calibrated`, which prices
a step with them, says how ranks share the cores of a host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from operator import itemgetter

# [size, seconds], the sizes rising, and [side, depth, operations per second]
Points = tuple[tuple[float, float], ...]
Rows = tuple[tuple[float, float, float], ...]


def seconds_at(points: Points, size: float) -> float:
    """Returns the seconds of this size; beyond the ends the rate stays."""
    if size <= 0:
        return 0.0
    smallest, _ = points[0]
    largest, _ = points[-1]
    inside = min(max(size, smallest), largest)
    return _between(points, inside) * size / inside


def beyond_smallest_s(points: Points, size: float) -> float:
    """Returns what this size takes beyond the smallest one."""
    _, least_s = points[0]
    return max(0.0, seconds_at(points, size) - least_s)


def rate_at(rows: Rows, side: float, depth: float) -> float:
    """Returns the operations per second of [side, depth] x [depth, side]; beyond the edge as at
    it."""
    rates = [(each, _between(points, depth)) for each, points in _by_side(rows).items()]
    return _between(rates, side)


@lru_cache(maxsize=64)
def _by_side(rows: Rows) -> dict[float, list[tuple[float, float]]]:
    table: dict[float, list[tuple[float, float]]] = {}
    for side, depth, rate in sorted(rows):
        table.setdefault(side, []).append((depth, rate))
    return table


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value at this place, on a straight line in logarithms between neighbouring
    points; beyond the ends that of the end."""
    after = bisect_right(points, at, key=itemgetter(0))
    low, first = points[max(0, after - 1)]
    high, second = points[min(after, len(points) - 1)]
    if low == high:
        return first
    share = log(at / low) / log(high / low)
    return exp((1 - share) * log(first) + share * log(second))


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds that the framework takes whatever the sizes are (dispatch, Python, tiny messages),
    and per parameter."""

    block: float  # for each block and microbatch, forward and backward
    microbatch: float  # for each microbatch, embedding, head and loss included
    layer: float  # for each layer, once a step
    step: float  # once a step
    parameter: float  # for each parameter that the rank holds, once a step

    def plus(self, other: Overhead, factor: float = 1.0) -> Overhead:
        """Returns the sum with `factor` times the other."""
        return Overhead(
            **{name: value + factor * getattr(other, name) for name, value in vars(self).items()}
        )


NO_OVERHEAD = Overhead(block=0.0, microbatch=0.0, layer=0.0, step=0.0, parameter=0.0)


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """A causal kernel, by keys and head dim."""

    forward: Rows
    backward: Rows


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """What one process takes alone, with so many threads (or a GPU)."""

    matmul: Mapping[str, Rows]  # by precision
    attention: Mapping[str, AttentionRates]  # by precision
    # seconds per byte of a block's other operators, were each group of them one kernel
    byte_s: float
    gradient_s: float  # seconds to add a weight's gradient to that of earlier microbatches
    logit_s: float  # seconds of the loss per logit, forward and backward
    overhead: Overhead
    # by kind: what it adds to a block beside the kernels that it repeats
    recompute: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ManyRanks:
    """What several ranks of one host take together: the work of an axis, each kind of message, a
    pipeline."""

    contention: float  # how much longer equal work takes than the cores' share alone explains
    action_s: float  # seconds that each action of a pipeline takes beside its work
    transfer: Points  # a message between two stages, by bytes
    axes: Mapping[str, Overhead]  # what an axis of this size adds
    collectives: Mapping[str, Points]  # the tp layers' by kind, by bytes of the whole tensor


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that was measured on a host. `cores` counts those that its ranks share, 0 where
    each rank has a device of its own. `synchronous` says that the host computes each operator
    before it dispatches the next."""

    cores: int
    synchronous: bool
    processes: Mapping[int, OneProcess]  # by threads
    ranks: Mapping[int, ManyRanks]  # by how many

    def process(self, ranks: int) -> OneProcess:
        """Returns the measurement of one of so many ranks of a host, whose threads are its share of
        the cores."""
        threads = max(1, self.cores // ranks)
        return self.processes[_nearest(self.processes, threads)]

    def together(self, ranks: int) -> ManyRanks | None:
        """Returns the measurement with so many ranks, or the next fewer; None where ranks do not
        share a host."""
        if not self.ranks or ranks == 1:
            return None
        return self.ranks[_nearest(self.ranks, ranks)]

    def overhead(self, axis: str, size: int) -> Overhead:
        """Returns what an axis adds: as measured, or scaled by the logarithm from the next smaller
        size that was."""
        sizes = [n for n, each in self.ranks.items() if axis in each.axes]
        if size == 1 or not sizes:
            return NO_OVERHEAD
        near = _nearest(sizes, size)
        scale = log(size) / log(near)
        return NO_OVERHEAD.plus(self.ranks[near].axes[axis], scale)

    def collective_s(self, kind: str, size: int, bytes_: float) -> float:
        """Seconds of a collective beyond those of the smallest message, which are in the overhead
        of the axis."""
        if size == 1 or not self.ranks:
            return 0.0
        near = _nearest(self.ranks, size)
        beyond_s = beyond_smallest_s(self.ranks[near].collectives[kind], bytes_)
        return beyond_s * log(size) / log(near)


def _nearest(measured: Collection[int], wanted: int) -> int:
    """Returns what was measured of this number, or of the next smaller one; of the smallest where
    there is none."""
    fewer = [number for number in measured if number <= wanted]
    return max(fewer, default=min(measured))

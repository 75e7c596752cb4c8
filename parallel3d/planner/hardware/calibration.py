"""Measurements of one host by `parallel3d-plan calibrate`: the section `measured` of a hardware
file.

It holds curves of kernels and collectives, and the overhead of parallel3d. All seconds are those of
a process that has a core or GPU to itself. `time.calibrated` computes step times from them and
accounts for ranks that share cores.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from operator import itemgetter

# Points: (size, seconds) in ascending order of size. Rows: (side, depth, FLOP/s).
Points = tuple[tuple[float, float], ...]
Rows = tuple[tuple[float, float, float], ...]


def beyond_smallest_s(points: Points, size: float) -> float:
    """Interpolates the seconds for this size, minus those for the smallest size, but at least 0.
    The rate is constant beyond the ends.
    """
    smallest, least_s = points[0]
    largest, _ = points[-1]
    inside = min(max(size, smallest), largest)
    return max(0.0, _between(points, inside) * size / inside - least_s)


def rate_at(rows: Rows, side: float, depth: float) -> float:
    """Returns the FLOP/s of [side, depth] x [depth, side], clamped at the edges of the grid."""
    rates = [(each, _between(points, depth)) for each, points in _by_side(rows).items()]
    return _between(rates, side)


@lru_cache(maxsize=64)
def _by_side(rows: Rows) -> dict[float, list[tuple[float, float]]]:
    table: dict[float, list[tuple[float, float]]] = {}
    for side, depth, rate in sorted(rows):
        table.setdefault(side, []).append((depth, rate))
    return table


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates linearly in logarithms, clamped at the ends."""
    after = bisect_right(points, at, key=itemgetter(0))
    low, first = points[max(0, after - 1)]
    high, second = points[min(after, len(points) - 1)]
    if low == high:
        return first
    share = log(at / low) / log(high / low)
    return exp((1 - share) * log(first) + share * log(second))


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Framework overhead in seconds (dispatch, Python, small messages), independent of tensor
    sizes."""

    block: float  # Per block and microbatch, in the forward and backward pass together.
    microbatch: float  # Per microbatch, including embedding, head and loss.
    layer: float  # Per layer and step.
    step: float  # Per step.
    parameter: float  # Per parameter of the rank and step.

    def plus(self, other: Overhead, factor: float = 1.0) -> Overhead:
        """Returns this overhead plus `factor` times the other one."""
        return Overhead(
            **{name: value + factor * getattr(other, name) for name, value in vars(self).items()}
        )


NO_OVERHEAD = Overhead(
    block=0.0,
    microbatch=0.0,
    layer=0.0,
    step=0.0,
    parameter=0.0,
)


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """FLOP/s of a causal attention kernel, by sequence length and head dimension."""

    forward: Rows
    backward: Rows


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """Measurements of a single process with a given number of threads, or one GPU."""

    matmul: Mapping[str, Rows]  # Keyed by precision.
    attention: Mapping[str, AttentionRates]  # Keyed by precision.
    # Seconds per byte of a block's other operators, as if each group were one kernel.
    byte_s: float
    gradient_s: float  # Seconds per element to accumulate a weight gradient.
    logit_s: float  # Seconds of the loss per logit, in the forward and backward pass together.
    overhead: Overhead
    # Seconds per recomputed block in addition to the repeated kernels, keyed by kind of recompute.
    recompute: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ManyRanks:
    """Measurements of several ranks on one host: overhead per axis, messages and pipeline
    actions."""

    contention: float  # Slowdown of equal work, in addition to the smaller share of cores.
    action_s: float  # Overhead of each pipeline action in seconds.
    transfer: Points  # Seconds of a message between two stages, by its bytes.
    axes: Mapping[str, Overhead]  # Overhead of each axis of this size.
    # Seconds of the collectives of tp layers, by kind and by the bytes of the full tensor.
    collectives: Mapping[str, Points]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All measurements of a host.

    `cores` is the number of cores that the ranks share, or 0 if each rank has its own device.
    `synchronous` is True if the host finishes each operator before it dispatches the next.
    """

    cores: int
    synchronous: bool
    processes: Mapping[int, OneProcess]  # Keyed by the number of threads.
    ranks: Mapping[int, ManyRanks]  # Keyed by the number of ranks.

    def process(self, ranks: int) -> OneProcess:
        """Returns the measurement of one of `ranks` processes that share the cores of a host."""
        threads = max(1, self.cores // ranks)
        return self.processes[_nearest(self.processes, threads)]

    def together(self, ranks: int) -> ManyRanks | None:
        """Returns the measurement with the largest number of ranks up to `ranks`, or else with the
        smallest one. Returns None for a single rank or if nothing was measured.
        """
        if not self.ranks or ranks == 1:
            return None
        return self.ranks[_nearest(self.ranks, ranks)]

    def overhead(self, axis: str, size: int) -> Overhead:
        """Returns the overhead of an axis. It is scaled by the logarithm of the size, from the
        largest measured size up to it, or else from the smallest. It is 0 if the size is 1 or the
        axis was not measured.
        """
        sizes = [n for n, each in self.ranks.items() if axis in each.axes]
        if size == 1 or not sizes:
            return NO_OVERHEAD
        near = _nearest(sizes, size)
        scale = log(size) / log(near)
        return NO_OVERHEAD.plus(self.ranks[near].axes[axis], scale)

    def collective_s(self, kind: str, size: int, bytes_: float) -> float:
        """Returns the seconds of a collective minus those of the smallest message, which the axis
        overhead includes. They are scaled by the logarithm of the size, and 0 if nothing was
        measured.
        """
        if size == 1 or not self.ranks:
            return 0.0
        near = _nearest(self.ranks, size)
        beyond_s = beyond_smallest_s(self.ranks[near].collectives[kind], bytes_)
        return beyond_s * log(size) / log(near)


def _nearest(measured: Collection[int], wanted: int) -> int:
    """Returns the largest measured number up to `wanted`, or the smallest one."""
    fewer = [number for number in measured if number <= wanted]
    return max(fewer, default=min(measured))

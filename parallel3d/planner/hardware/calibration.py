"""What `parallel3d-plan calibrate` has measured on one host, the section `measured` of a hardware
file: curves of kernels and collectives, and what this project's own framework adds to them. All
seconds are those of a process that has a core (or a GPU) to itself; `time.calibrated`, which prices
a step with them, says how ranks share the cores of a host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Seconds by size, a straight line in logarithms between neighbouring points; beyond the ends
    the rate stays."""

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        if size <= 0:
            return 0.0
        sizes, seconds = zip(*self.points, strict=True)
        if not sizes[0] <= size < sizes[-1]:
            end = 0 if size < sizes[0] else -1
            return float(seconds[end] * size / sizes[end])
        at, share = _place(sizes, size)
        before = log(seconds[at])
        after = log(seconds[at + 1])
        return exp((1 - share) * before + share * after)


@dataclass(frozen=True)
class Grid:
    """Operations per second of [side, depth] x [depth, side], bilinear in logarithms; beyond the
    edge as at it."""

    sides: tuple[float, ...]
    depths: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]  # by side, then by depth

    def at(self, side: float, depth: float) -> float:
        i, u = _place(self.sides, side)
        j, v = _place(self.depths, depth)
        corners = (
            (i, j, (1 - u) * (1 - v)),
            (i + 1, j, u * (1 - v)),
            (i, j + 1, (1 - u) * v),
            (i + 1, j + 1, u * v),
        )
        log_rate = 0.0
        for at_side, at_depth, weight in corners:
            if weight:
                log_rate += weight * log(self.rates[at_side][at_depth])
        return exp(log_rate)


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
class OneProcess:
    """What one process takes alone, with so many threads (or a GPU)."""

    matmul: Mapping[str, Grid]  # by precision
    # by precision: a causal one, by keys and head dim, forward and backward
    attention: Mapping[str, tuple[Grid, Grid]]
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
    transfer: Curve  # a message between two stages, by bytes
    axes: Mapping[str, Overhead]  # what an axis of this size adds
    collectives: Mapping[str, Curve]  # the tp layers' by kind: seconds by bytes of the whole tensor


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
        curve = self.ranks[near].collectives[kind]
        _, least_s = curve.points[0]
        beyond_s = max(0.0, curve.at(bytes_) - least_s)
        return beyond_s * log(size) / log(near)


def calibration_from_tree(tree: Mapping[str, Any]) -> Calibration:
    """Reads a hardware file's section `measured`. Raises KeyError, TypeError or ValueError where it
    lacks something."""
    return Calibration(
        cores=int(tree["cores"]),
        synchronous=bool(tree["synchronous"]),
        processes={int(n): one_process_from_tree(each) for n, each in tree["processes"].items()},
        ranks={int(n): _many_ranks(each) for n, each in (tree.get("ranks") or {}).items()},
    )


def _many_ranks(tree: Mapping[str, Any]) -> ManyRanks:
    return ManyRanks(
        contention=float(tree["contention"]),
        action_s=float(tree["action_s"]),
        transfer=_curve(tree["transfer"]),
        axes={axis: Overhead(**added) for axis, added in tree["axes"].items()},
        collectives={kind: _curve(points) for kind, points in tree["collectives"].items()},
    )


def one_process_from_tree(tree: Mapping[str, Any]) -> OneProcess:
    attention = {}
    for precision, ways in tree["attention"].items():
        attention[precision] = _grid(ways["forward"]), _grid(ways["backward"])
    return OneProcess(
        matmul={precision: _grid(rows) for precision, rows in tree["matmul"].items()},
        attention=attention,
        byte_s=float(tree["byte_s"]),
        gradient_s=float(tree["gradient_s"]),
        logit_s=float(tree["logit_s"]),
        overhead=Overhead(**tree["overhead"]),
        recompute=dict(tree["recompute"]),
    )


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    """Reads pairs of [size, seconds]. Raises ValueError where sizes do not rise."""
    pairs = [(float(size), max(float(seconds), 1e-9)) for size, seconds in points]
    sizes = [size for size, _ in pairs]
    if not pairs or sizes != sorted(set(sizes)):
        raise ValueError("a curve of [size, seconds] whose sizes rise")
    return Curve(tuple(pairs))


def _grid(rows: Sequence[Sequence[float]]) -> Grid:
    """Reads rows of [side, depth, operations per second]. Raises KeyError where one of the pairs is
    missing."""
    rates = {(float(side), float(depth)): float(rate) for side, depth, rate in rows}
    sides = sorted({side for side, _ in rates})
    depths = sorted({depth for _, depth in rates})
    table = []
    for side in sides:
        table.append(tuple(rates[side, depth] for depth in depths))
    return Grid(tuple(sides), tuple(depths), tuple(table))


def _nearest(measured: Collection[int], wanted: int) -> int:
    """Returns what was measured of this number, or of the next smaller one; of the smallest where
    there is none."""
    fewer = [number for number in measured if number <= wanted]
    return max(fewer, default=min(measured))


def _place(values: Sequence[float], value: float) -> tuple[int, float]:
    """Returns the interval that a value lies in, and how far into it the value lies."""
    if len(values) == 1 or value <= values[0]:
        return 0, 0.0
    if value >= values[-1]:
        return len(values) - 2, 1.0
    at = bisect_right(values, value) - 1
    interval = log(values[at + 1] / values[at])
    return at, log(value / values[at]) / interval

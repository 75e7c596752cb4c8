"""Measurements that the ranks make together: matmuls, and every axis of the mesh.

All groups of an axis are measured at once, because they send at once in a step: ranks share a
network port. Sizes grow until a message takes long on any rank, so the check takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import Precision
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis
from parallel3d.torch_private import group_of

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}  # all other precisions compute in bfloat16
_SIDES, _SAMPLE_S, _MATMULS_S = {"cpu": 512, "cuda": 8192}, 0.1, 1.5
_SMALLEST, _GROWTH = 1 << 10, 4
_LARGEST = {"cpu": 1 << 24, "cuda": 1 << 28}
_ROUND_S, _FEWEST, _MOST = 0.05, 3, 30  # seconds and calls for each size
# a size is the last one that takes so long, and so many times the smallest one's
_LONG_S, _LONG_WAITS = 0.1, 8

Rows = tuple[tuple[int, float], ...]  # bytes and seconds


@dataclass(frozen=True, kw_only=True)
class TimedLink:
    """What a rank has measured of an axis: all-reduces in its group, or messages that it sent to a
    neighbour, on their way."""

    axis: str
    kind: Literal["all-reduce", "message"]
    ranks: tuple[int, ...]  # the members of the group, or the sender and the receiver
    rows: Rows

    @property
    def bandwidth(self) -> float:
        """Bytes per second at the largest size, as a rank sends them: 2 (n - 1) / n of those of an
        all-reduce (nccl-tests, doc/PERFORMANCE.md), and all of a message."""
        bytes_, seconds = self.rows[-1]
        size = len(self.ranks)
        return 2 * (size - 1) / size * bytes_ / seconds

    @property
    def latency_s(self) -> float:
        return self.rows[0][1]


@torch.no_grad()
def measure_matmuls(device: torch.device, precision: Precision) -> float:
    """Returns the FLOP/s of a large matmul, the median of samples in a second or two, while all
    other ranks do the same."""
    side = _SIDES[device.type]
    a, b = (
        torch.randn(side, side, device=device, dtype=_DTYPES.get(precision, torch.bfloat16))
        for _ in range(2)
    )
    _timed(lambda: a @ b, device)
    # Several at a time: of two ranks that share a core each has it for a few products, and then for
    # none.
    count = max(1, int(_SAMPLE_S / max(_timed(lambda: a @ b, device), 1e-6)))
    dist.barrier()
    end, taken = time.perf_counter() + _MATMULS_S, list[float]()
    while len(taken) < _FEWEST or time.perf_counter() < end:
        taken.append(_timed(lambda: [a @ b for _ in range(count)], device) / count)
    return 2 * side**3 / median(taken)


def measure_axis(name: str, axis: Axis, device: torch.device) -> list[TimedLink]:
    """Measures this rank's group of an axis, while all other groups of it do the same. Every rank
    calls it."""
    ranks = tuple(dist.get_process_group_ranks(axis.group))
    rows = _time_sizes(lambda x: all_reduce(x, axis), device)
    found = [TimedLink(axis=name, kind="all-reduce", ranks=ranks, rows=rows)]
    # Each second rank sends to the next one and then receives; then the others.
    for parity in range(min(2, axis.size - 1)):
        lower = axis.rank if axis.rank % 2 == parity else axis.rank - 1
        other = lower + 1 if axis.rank == lower else lower
        for up in (True, False):
            if lower < 0 or lower + 1 >= axis.size:
                _time_sizes(_send_nothing, device)
                continue
            sends = (axis.rank == lower) == up
            rows = _time_sizes(_there_and_back(axis, other, device, sends=sends), device)
            if sends:
                back_s = rows[0][1] / 2
                one_way = tuple((bytes_, max(s - back_s, 1e-9)) for bytes_, s in rows)
                pair = (ranks[axis.rank], ranks[other])
                found.append(TimedLink(axis=name, kind="message", ranks=pair, rows=one_way))
    return found


def host_axes(hosts: Sequence[str]) -> dict[str, Axis]:
    """Returns the axes of a cluster with several ranks: `node`, the ranks of a host, and `network`,
    those in the same place on each host. Hosts with unlike numbers of ranks have none. Every rank
    calls it."""
    me, at = dist.get_rank(), dict[str, list[int]]()
    for rank, host in enumerate(hosts):
        at.setdefault(host, []).append(rank)
    own = at[hosts[me]]
    if len({len(ranks) for ranks in at.values()}) > 1:
        return {}
    found = {"node": own, "network": [ranks[own.index(me)] for ranks in at.values()]}
    axes = {}
    for name, ranks in found.items():
        if len(ranks) > 1:
            group = group_of(ranks, f"check_{name}", name=f"check_{name}_{ranks[0]}")
            axes[name] = Axis(len(ranks), ranks.index(me), group)
    return axes


def _there_and_back(
    axis: Axis, other: int, device: torch.device, *, sends: bool
) -> Callable[[Tensor], None]:
    """Returns a call that sends a tensor to another rank of the group, which answers with a single
    number."""
    short = torch.zeros(1, device=device)

    def call(x: Tensor) -> None:
        if sends:
            dist.send(x, group=axis.group, group_dst=other)
            dist.recv(short, group=axis.group, group_src=other)
        else:
            dist.recv(x, group=axis.group, group_src=other)
            dist.send(short, group=axis.group, group_dst=other)

    return call


def _send_nothing(x: Tensor) -> None:
    """Is timed while others send."""


def _time_sizes(call: Callable[[Tensor], object], device: torch.device) -> Rows:
    """Returns the seconds of a call by the bytes of its tensor, up to the first size that takes
    long."""
    rows: list[tuple[int, float]] = []
    size, long_s = _SMALLEST, _LONG_S
    call(torch.zeros(size // 4, device=device))  # this opens connections
    while size <= _LARGEST[device.type]:
        once = partial(call, torch.zeros(size // 4, device=device))
        dist.barrier()
        first = _timed(once, device)
        slowest = _of_the_slowest(first)
        if slowest > long_s and rows:
            return (*rows, (size, first))
        calls = min(_MOST, max(_FEWEST, int(_ROUND_S / max(slowest, 1e-6))))
        seconds = median(_timed(once, device) for _ in range(calls))
        if not rows:
            long_s = max(_LONG_S, _LONG_WAITS * _of_the_slowest(seconds))
        rows.append((size, max(seconds, 1e-9)))
        size *= _GROWTH
    return tuple(rows)


def _of_the_slowest(seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

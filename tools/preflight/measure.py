"""What the ranks measure together: their clocks, how fast each computes, and every axis of the mesh.

All groups of an axis are measured at once, as they send at once in a step, so that ranks which share a network port get
their part of it. Sizes grow until a message takes long, which all ranks decide together: a slow link gets small
messages, and the whole takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import Precision
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis
from parallel3d.torch_private import group_of

_PINGS = 5
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}  # all other precisions compute in bfloat16
_SIDES, _SAMPLE_S, _PRODUCTS_S = {"cpu": 512, "cuda": 8192}, 0.1, 1.5
_SMALLEST, _GROWTH = 1 << 10, 4
_LARGEST = {"cpu": 1 << 24, "cuda": 1 << 28}
_ROUND_S, _FEWEST, _MOST = 0.05, 3, 30  # seconds and calls for each size
_LONG_S, _LONG_WAITS = 0.1, 8  # a size is the last one that takes so long, and so many times the smallest one's

Rows = tuple[tuple[int, float], ...]  # bytes and seconds


@dataclass(frozen=True, kw_only=True)
class TimedMessage:
    """Messages from one rank to its neighbour on an axis: the seconds of one on its way."""

    sender: int
    receiver: int
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class AxisTimes:
    """What a rank has measured of one axis: all-reduces in its group, and the messages that it sent."""

    axis: str
    ranks: tuple[int, ...]  # the members of the group
    all_reduce: Rows
    messages: tuple[TimedMessage, ...]


def measure_clocks(leaders: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Returns on rank 0 by how many seconds the clock of each of `leaders` is ahead of its own, and how far that may be
    off: half of the shortest of some round trips."""
    found, rank = {}, dist.get_rank()
    for leader in leaders:
        trips = []
        for _ in range(_PINGS if rank in (0, leader) else 0):
            told, start = torch.zeros(1, dtype=torch.float64), time.time()
            if rank == 0:
                dist.send(told, leader)
                dist.recv(told, leader)
                end = time.time()
                trips.append((end - start, told.item() - (start + end) / 2))
            else:
                dist.recv(told, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
        if rank == 0:
            trip, ahead = min(trips)
            found[leader] = (ahead, trip / 2)
    return found


@torch.no_grad()
def measure_products(device: torch.device, precision: Precision) -> float:
    """Returns the operations per second of a large matrix product, the median of some samples in a second or two,
    while all other ranks do the same."""
    side = _SIDES[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=_DTYPES.get(precision, torch.bfloat16)) for _ in range(2))
    _timed(lambda: a @ b, device)
    # Several at a time: of two ranks that share a core each has it for a few products, and then for none.
    count = max(1, int(_SAMPLE_S / max(_timed(lambda: a @ b, device), 1e-6)))
    dist.barrier()
    end, taken = time.perf_counter() + _PRODUCTS_S, list[float]()
    while len(taken) < _FEWEST or time.perf_counter() < end:
        taken.append(_timed(lambda: [a @ b for _ in range(count)], device) / count)
    return 2 * side**3 / median(taken)


def measure_axis(name: str, axis: Axis, size: int, device: torch.device) -> AxisTimes:
    """Measures this rank's group of an axis, while all other groups of it do the same. Every rank calls it; a rank
    without a group only takes part in what all agree on. `size` is that of the largest group."""
    me = dist.get_rank()
    if axis.group is None:
        for _ in range(1 + 2 * min(2, size - 1)):
            _sweep(_idle, device)
        return AxisTimes(axis=name, ranks=(me,), all_reduce=(), messages=())
    ranks, messages = tuple(dist.get_process_group_ranks(axis.group)), list[TimedMessage]()
    sums = _sweep(lambda x: all_reduce(x, axis), device)
    for parity in range(min(2, size - 1)):
        lower = axis.rank if axis.rank % 2 == parity else axis.rank - 1
        other = lower + 1 if axis.rank == lower else lower
        for up in (True, False):  # each second rank sends to the next one, and then the other way
            if lower < 0 or lower + 1 >= axis.size:
                _sweep(_idle, device)
                continue
            sends = (axis.rank == lower) == up
            rows = _sweep(_there_and_back(axis, other, device, sends=sends), device)
            if sends:
                back_s = rows[0][1] / 2
                way = tuple((bytes_, max(seconds - back_s, 1e-9)) for bytes_, seconds in rows)
                messages.append(TimedMessage(sender=me, receiver=ranks[other], rows=way))
    return AxisTimes(axis=name, ranks=ranks, all_reduce=sums, messages=tuple(messages))


@dataclass(frozen=True)
class HostAxis:
    """An axis that is on no mesh: this rank's group, and the size of the largest one."""

    axis: Axis
    size: int


def host_axes(hosts: Sequence[str]) -> dict[str, HostAxis]:
    """Returns the axes by which the links of a cluster are known whatever the layout is: `node`, the ranks of a host,
    and `network`, those in the same place on each host. Every rank calls it."""
    me, at = dist.get_rank(), dict[str, list[int]]()
    for rank, host in enumerate(hosts):
        at.setdefault(host, []).append(rank)
    own, place = at[hosts[me]], at[hosts[me]].index(me)
    across = [ranks[place] for ranks in at.values() if place < len(ranks)]
    found = {}
    for name, ranks, size in (("node", own, max(map(len, at.values()))), ("network", across, len(at))):
        if size > 1:
            group = group_of(ranks, f"check_{name}", name=f"check_{name}_{ranks[0]}") if len(ranks) > 1 else None
            found[name] = HostAxis(Axis(len(ranks), ranks.index(me), group), size)
    return found


def _there_and_back(axis: Axis, other: int, device: torch.device, *, sends: bool) -> Callable[[Tensor], None]:
    """Returns a call that sends a tensor to another rank of the group, which answers with a single number."""
    short = torch.zeros(1, device=device)

    def call(x: Tensor) -> None:
        if sends:
            dist.send(x, group=axis.group, group_dst=other)
            dist.recv(short, group=axis.group, group_src=other)
        else:
            dist.recv(x, group=axis.group, group_src=other)
            dist.send(short, group=axis.group, group_dst=other)

    return call


def _idle(x: Tensor) -> None:
    """Sends nothing, while others do."""


def _sweep(call: Callable[[Tensor], object], device: torch.device) -> Rows:
    """Returns the seconds of a call by the bytes of its tensor."""
    rows: list[tuple[int, float]] = []
    size, long_s = _SMALLEST, _LONG_S
    call(torch.zeros(size // 4, device=device))  # this opens connections
    while size <= _LARGEST[device.type]:
        x = torch.zeros(size // 4, device=device)
        dist.barrier()
        first = _timed(lambda x=x: call(x), device)  # type: ignore[misc]
        slowest = _of_the_slowest(first)
        if slowest > long_s and rows:
            return (*rows, (size, first))
        calls = min(_MOST, max(_FEWEST, int(_ROUND_S / max(slowest, 1e-6))))
        seconds = median(_timed(lambda x=x: call(x), device) for _ in range(calls))  # type: ignore[misc]
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

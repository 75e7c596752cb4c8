"""Collectives over one mesh axis, on plain tensors and without autograd.

n is the size of the axis. If it is 1, they return their input without communication. The `start_*`
functions return at once with a function that waits for the result. Results of all-reduce and
all-gather are bitwise identical on all ranks. Small CPU tensors of ranks on one host go through
`shared_memory.collectives`, all others through the backend. Under `torch.compile`, layers call them
through `outside_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce, wraps
from typing import Any, Concatenate, Literal, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from parallel3d.mesh import Axis
from parallel3d.shared_memory.collectives import SLOT_BYTES, exchange_of
from parallel3d.watch.step_clock import timed

WAITS_FOR_RANKS = True  # Read by parallel3d.watch.heartbeat.

Wait = Callable[[], Tensor]
Reduction = Literal["sum", "max"]
_P = ParamSpec("_P")

SEQUENCE_DIM = 1

# torch 2.13 renamed these two functions and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def outside_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, with a graph break under `torch.compile`."""
    if is_compiling():
        function = torch.compiler.disable(function)
    return function(*args)


_Start = Callable[Concatenate[Tensor, Axis, _P], Wait]


def _timed(start: _Start[_P]) -> _Start[_P]:
    """Decorator for the functions below: the time of starts and waits belongs to the axis' cause.

    Without other ranks, the wait returns the input.
    """

    @wraps(start)
    def timed_start(x: Tensor, axis: Axis, /, *args: _P.args, **kwargs: _P.kwargs) -> Wait:
        if axis.size == 1:
            return lambda: x
        with timed(axis.cause):
            wait = start(x, axis, *args, **kwargs)

        def timed_wait() -> Tensor:
            with timed(axis.cause):
                return wait()

        return timed_wait

    return timed_start


@_timed
def start_all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
    """Starts the sum or elementwise maximum of x over the axis. May overwrite x.

    Sends 2 (n - 1) / n of x per rank, or (n - 1) times x through shared memory.
    """
    x = x.contiguous()
    if parts := _start_exchange(x, axis):
        add = torch.add if op == "sum" else torch.maximum
        return lambda: reduce(add, parts())
    work = dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), axis.group, async_op=True)
    return lambda: after(work, x)


@_timed
def start_gather(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Wait:
    """Starts the all-gather [..., d / n, ...] -> [..., d, ...] along `dim` >= 0.

    Sends (n - 1) times x per rank.
    """
    x = x.contiguous()
    if parts := _start_exchange(x, axis):
        return lambda: torch.cat(parts(), dim=dim)
    gathered = x.new_empty((axis.size, *x.shape))
    work = all_gather_single(gathered.flatten(0, 1), x, group=axis.group, async_op=True)
    # No copy if the dims before `dim` have size 1.
    return lambda: after(work, gathered, x).movedim(0, dim).flatten(dim, dim + 1)


@_timed
def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Wait:
    """Starts the reduce-scatter [..., d, ...] -> [..., d / n, ...] along `dim` >= 0.

    Sends (n - 1) / n of x per rank.
    """
    # No copy if the dims before `dim` have size 1.
    stacked = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    if parts := _start_exchange(stacked, axis):
        return lambda: reduce(torch.add, [part[axis.rank] for part in parts()])
    out = torch.empty_like(stacked[0])
    work = reduce_scatter_single(out, stacked.flatten(0, 1), group=axis.group, async_op=True)
    return lambda: after(work, out, stacked)


@_timed
def _start_all_to_all(x: Tensor, axis: Axis) -> Wait:
    x = x.contiguous()
    if parts := _start_exchange(x, axis):
        return lambda: torch.stack([part[axis.rank] for part in parts()])
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=axis.group)
    return lambda: out


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Sends x[r] of x [n, ...] to rank r. Returns the received tensors, stacked in rank order.

    Sends (n - 1) / n of x per rank, or (n - 1) times x through shared memory.
    """
    return _start_all_to_all(x, axis)()


def all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum") -> Tensor:
    """Returns the sum or elementwise maximum of x over the axis. May overwrite x."""
    return start_all_reduce(x, axis, op)()


def gather(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Returns x all-gathered along `dim`: [..., d / n, ...] -> [..., d, ...]."""
    return start_gather(x, axis, dim)()


def reduce_scatter(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Returns this rank's part of the sum along `dim`: [..., d, ...] -> [..., d / n, ...]."""
    return start_reduce_scatter(x, axis, dim)()


def sum_partial(x: Tensor, axis: Axis, *, scattered: bool) -> Tensor:
    """Returns the sum of x over the axis, or this rank's part along the sequence if `scattered`.

    May overwrite x.
    """
    return reduce_scatter(x, axis) if scattered else all_reduce(x, axis)


def all_reduce_over(axes: Mapping[str, Axis], x: Tensor) -> Tensor:
    """Returns the sum of `x` over all ranks of `axes`.

    Reduces axis by axis, because gloo is slow in large groups.
    """
    for axis in axes.values():
        x = all_reduce(x, axis)
    return x


def _start_exchange(x: Tensor, axis: Axis) -> Callable[[], list[Tensor]] | None:
    """Starts an exchange through shared memory. Returns a function that waits for all tensors.

    Returns None if the tensor must go through the backend.
    """
    if x.device.type != "cpu" or x.nbytes > SLOT_BYTES:
        return None
    assert axis.group is not None
    exchange = exchange_of(axis.group)
    return None if exchange is None else exchange.start(x)


def after(work: dist.Work, x: Tensor, *sent: Tensor) -> Tensor:
    """Waits for the work and returns x. Keeps the tensors `sent` alive until then."""
    work.wait()
    return x

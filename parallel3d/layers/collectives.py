"""Collectives over one axis of the mesh, on plain tensors, without autograd: what the layers'
backward passes call.

An axis of size 1 sends nothing and gives its input back, so that no caller asks how large the axis
is. `start_*` return at once a function that waits for the result, the same bits on every rank.
Small tensors of CPUs on one host go through `shared_memory.collectives`, all others through the
backend. Under `torch.compile` the layers call them by `outside_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from parallel3d.mesh import Axis
from parallel3d.shared_memory.collectives import SLOT_BYTES, exchange_of

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

Wait = Callable[[], Tensor]
Reduction = Literal["sum", "max"]

SEQUENCE_DIM = 1  # activations are [batch, seq, hidden]

# torch 2.13 renames these two and warns of the old names; 2.11 has only those.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def outside_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function. Under `torch.compile` the graph breaks here, and goes on after it."""
    if is_compiling():
        function = torch.compiler.disable(function)
    return function(*args)


def start_all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
    """Starts the sum or the elementwise maximum of x over the axis; `x` may be overwritten. Sends
    2 (n - 1) / n of x per rank ((n - 1) times x if it is small)."""
    if axis.size == 1:
        return lambda: x
    x = x.contiguous()
    if parts := _start_exchange(x, axis):
        add = torch.add if op == "sum" else torch.maximum
        return lambda: reduce(add, parts())
    work = dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), axis.group, async_op=True)
    return lambda: after(work, x)


def start_gather(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Wait:
    """Starts to gather [..., d / n, ...] -> [..., d, ...], joined along `dim`, which is not
    negative. Sends (n - 1) times x per rank."""
    if axis.size == 1:
        return lambda: x
    x = x.contiguous()
    if parts := _start_exchange(x, axis):
        return lambda: torch.cat(parts(), dim=dim)
    gathered = x.new_empty((axis.size, *x.shape))
    work = all_gather_single(gathered.flatten(0, 1), x, group=axis.group, async_op=True)
    # no copy where the dims before `dim` are of size 1
    return lambda: after(work, gathered, x).movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Wait:
    """Starts to sum [..., d, ...] -> this rank's [..., d / n, ...] of the sum; `dim` is not
    negative. Sends (n - 1) / n of x per rank."""
    if axis.size == 1:
        return lambda: x
    # no copy where batch = 1
    stacked = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    if parts := _start_exchange(stacked, axis):
        return lambda: reduce(torch.add, [part[axis.rank] for part in parts()])
    out = torch.empty_like(stacked[0])
    work = reduce_scatter_single(out, stacked.flatten(0, 1), group=axis.group, async_op=True)
    return lambda: after(work, out, stacked)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Sends x[r] of [n, ...] to rank r. Returns what the ranks have sent here, in their order.
    Sends (n - 1) / n of x per rank ((n - 1) times x if it is small)."""
    if axis.size == 1:
        return x
    x = x.contiguous()
    if parts := _start_exchange(x, axis):
        return torch.stack([part[axis.rank] for part in parts()])
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=axis.group)
    return out


def all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum") -> Tensor:
    """Returns the sum or the elementwise maximum of x over the axis; `x` may be overwritten."""
    return start_all_reduce(x, axis, op)()


def gather(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Returns what `start_gather` gathers."""
    return start_gather(x, axis, dim)()


def reduce_scatter(x: Tensor, axis: Axis, dim: int = SEQUENCE_DIM) -> Tensor:
    """Returns this rank's part of the sum, as `start_reduce_scatter` does."""
    return start_reduce_scatter(x, axis, dim)()


def sum_partial(x: Tensor, axis: Axis, *, scattered: bool) -> Tensor:
    """Returns the sum of x over the axis, or with `scattered` this rank's part of it along the
    sequence; `x` may be overwritten."""
    return reduce_scatter(x, axis) if scattered else all_reduce(x, axis)


def all_reduce_over(axes: Mapping[str, Axis], x: Tensor) -> Tensor:
    """Returns the sum of `x` over all ranks of `axes`, reduced axis by axis, because gloo is slow
    in a group of many ranks."""
    for axis in axes.values():
        x = all_reduce(x, axis)
    return x


def _start_exchange(x: Tensor, axis: Axis) -> Callable[[], list[Tensor]] | None:
    """Starts to send a tensor through shared memory; the function that is returned gives every
    rank's. Returns None where it goes through the backend."""
    if x.device.type != "cpu" or x.nbytes > SLOT_BYTES:
        return None
    assert axis.group is not None
    exchange = exchange_of(axis.group)
    return None if exchange is None else exchange.start(x)


def after(work: dist.Work, x: Tensor, *sent: Tensor) -> Tensor:
    """Returns x when the work is done. The tensors `sent` live until then."""
    work.wait()
    return x

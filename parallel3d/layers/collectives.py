"""Collectives over one axis of the mesh, on plain tensors, without autograd: what the layers' backward passes call.

Each takes the axis as a one-dimensional DeviceMesh or None. None, or an axis of size 1, sends nothing and returns its
input, so that no caller asks how large the axis is. `start_*` return at once; `Pending.wait` gives the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import DeviceMesh

# torch 2.13 renames these two and warns of the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

SEQUENCE_DIM = 1  # of activations [batch, seq, hidden]


def axis_size(axis: DeviceMesh | None) -> int:
    return 1 if axis is None else axis.size()


def axis_rank(axis: DeviceMesh | None) -> int:
    return 0 if axis is None else axis.get_local_rank()


@dataclass(frozen=True)
class Pending:
    """A tensor that is on its way. `chunks` > 1: it arrives stacked by rank and is joined along the sequence."""

    tensor: Tensor
    work: dist.Work | None = None
    chunks: int = 1

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        if self.chunks == 1:
            return self.tensor
        return rearrange(self.tensor, "(n b) s ... -> b (n s) ...", n=self.chunks)


def start_all_reduce(x: Tensor, axis: DeviceMesh | None) -> Pending:
    """Sum over the axis. `x` is overwritten; it must be contiguous. Sends 2 (n - 1) / n of x per rank."""
    if axis_size(axis) == 1:
        return Pending(x)
    assert axis is not None
    return Pending(x, dist.all_reduce(x, group=axis.get_group(), async_op=True))


def start_gather_sequence(x: Tensor, axis: DeviceMesh | None) -> Pending:
    """[batch, seq / n, hidden] -> [batch, seq, hidden]. Sends (n - 1) times x per rank."""
    n = axis_size(axis)
    if n == 1:
        return Pending(x)
    assert axis is not None
    x = x.contiguous()
    stacked = x.new_empty((n * x.shape[0], *x.shape[1:]))  # [n * batch, seq / n, hidden]
    work = _all_gather(stacked, x, group=axis.get_group(), async_op=True)
    return Pending(stacked, work, chunks=n)


def start_reduce_scatter_sequence(x: Tensor, axis: DeviceMesh | None) -> Pending:
    """[batch, seq, hidden] -> this rank's [batch, seq / n, hidden] of the sum. Sends (n - 1) / n of x per rank."""
    n = axis_size(axis)
    if n == 1:
        return Pending(x)
    assert axis is not None
    stacked = rearrange(x, "b (n s) ... -> (n b) s ...", n=n).contiguous()  # no copy where batch = 1
    out = stacked.new_empty((x.shape[0], x.shape[1] // n, *x.shape[2:]))
    return Pending(out, _reduce_scatter(out, stacked, group=axis.get_group(), async_op=True))


def all_reduce(x: Tensor, axis: DeviceMesh | None) -> Tensor:
    return start_all_reduce(x, axis).wait()


def all_reduce_max(x: Tensor, axis: DeviceMesh | None) -> Tensor:
    """Largest over the axis, elementwise. `x` is overwritten."""
    if axis_size(axis) > 1:
        assert axis is not None
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.get_group())
    return x


def gather_sequence(x: Tensor, axis: DeviceMesh | None) -> Tensor:
    return start_gather_sequence(x, axis).wait()


def reduce_scatter_sequence(x: Tensor, axis: DeviceMesh | None) -> Tensor:
    return start_reduce_scatter_sequence(x, axis).wait()

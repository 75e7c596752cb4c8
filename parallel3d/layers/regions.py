"""Regions change how a tensor lies over the tp axis: functions, each with the collective that
is its conjugate in the backward. Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3: its
f and g) and sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2: its g and
its conjugate).

Shapes: d is the size of the dim named by `dim`, n = tp. *whole*: the same on every rank. *partial*:
a summand on each.

    function                       forward                             backward
    copy_to_region                 whole x -> x                        partial gradients -> their sum, all-reduced
    reduce_from_region             partial x -> the sum, all-reduced   whole gradient -> itself
    scatter_to_region              whole [d] -> own part [d / n]       parts [d / n] -> [d], all-gathered
    gather_from_region             parts [d / n] -> [d], all-gathered  whole gradient [d] -> own part [d / n]
    all_gather_to_region           parts [d / n] -> [d], all-gathered  partial [d] -> own part of the sum
    reduce_scatter_from_region     partial [d] -> own part of the sum  parts [d / n] -> [d], all-gathered
    all_to_all_of_region           x[r] goes to rank r                 gradients go back likewise

Own part of the sum: by reduce-scatter. `gather_from_region` is for what every rank then computes
alike, `all_gather_to_region` for what each uses in another way (a column-parallel layer); taking
one for the other gives gradients n times too large or too small.

An all-reduce sends 2 (n - 1) / n of its tensor per rank, a reduce-scatter (n - 1) / n of its input,
an all-gather (n - 1) times its input. `tp` may be the mesh, an `Axis` already looked up, or None;
with None or one rank nothing is sent. The graph of `torch.compile` breaks at a region. The linear
layers compute with the same collectives, but hide them behind matmuls.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import DeviceMesh

from parallel3d.layers.collectives import (
    SEQUENCE_DIM,
    all_reduce,
    all_to_all,
    gather,
    outside_graph,
    reduce_scatter,
)
from parallel3d.mesh import Axis

Tp = DeviceMesh | Axis | None
# changes how a tensor lies over the axis; the number is the dim
Change = Callable[[Tensor, Axis, int], Tensor]


def copy_to_region(x: Tensor, tp: Tp) -> Tensor:
    """Gives x, which is the same on every rank. Its gradient is summed over tp."""
    return _apply(x, tp, 0, forward=_alias, backward=_sum)


def reduce_from_region(x: Tensor, tp: Tp) -> Tensor:
    """Sums x over tp. Its gradient, the same on every rank, is passed on."""
    return _apply(x, tp, 0, forward=_sum, backward=_alias)


def scatter_to_region(x: Tensor, tp: Tp, dim: int = -1) -> Tensor:
    """Takes this rank's [..., d / n, ...] of [..., d, ...]. Raises ValueError where tp does not
    divide d."""
    return _apply(x, tp, dim, forward=_own_part, backward=gather, divides=True)


def gather_from_region(x: Tensor, tp: Tp, dim: int = -1) -> Tensor:
    """All-gathers [..., d / n, ...] -> [..., d, ...], for what every rank computes alike."""
    return _apply(x, tp, dim, forward=gather, backward=_own_part)


def all_gather_to_region(x: Tensor, tp: Tp, dim: int = SEQUENCE_DIM) -> Tensor:
    """All-gathers [..., d / n, ...] -> [..., d, ...], along the sequence before a column-parallel
    layer."""
    return _apply(x, tp, dim, forward=gather, backward=reduce_scatter)


def reduce_scatter_from_region(x: Tensor, tp: Tp, dim: int = SEQUENCE_DIM) -> Tensor:
    """Reduce-scatters [..., d, ...] -> this rank's [..., d / n, ...] of the sum over tp, along the
    sequence after a row-parallel layer. Raises ValueError where tp does not divide d."""
    return _apply(x, tp, dim, forward=reduce_scatter, backward=gather, divides=True)


def all_to_all_of_region(x: Tensor, tp: Tp) -> Tensor:
    """Sends x[r] of [n, ...] to rank r, and returns what the ranks sent here, in their order."""
    return _apply(x, tp, 0, forward=_all_to_all, backward=_all_to_all)


def _apply(
    x: Tensor, tp: Tp, dim: int, *, forward: Change, backward: Change, divides: bool = False
) -> Tensor:
    axis = tp if isinstance(tp, Axis) else Axis.of(tp)
    if axis.size == 1:
        return x
    if divides and x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {list(x.shape)} cannot be split over tp = {axis.size}")
    y: Tensor = outside_graph(_Region.apply, x, axis, dim % x.ndim, forward, backward)
    return y


class _Region(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, forward: Change, backward: Change
    ) -> Tensor:
        ctx.axis = axis
        ctx.dim = dim
        ctx.change = backward
        return forward(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.change(grad, ctx.axis, ctx.dim), None, None, None, None


def _alias(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.view_as(x)  # a function's output must not be its input


def _all_to_all(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return all_to_all(x, axis)


def _sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return all_reduce(x.clone(), axis)  # cloned: others may hold x, too


def _own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return axis.part(x, dim).clone(memory_format=torch.contiguous_format)

"""Regions change how a tensor lies over the tp axis: six functions, each with the collective that is its conjugate in
the backward. Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3: its f and g) and sequence parallelism
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2: its g and its conjugate).

Shapes: d is the size of the dim named by `dim`, n = tp. *whole*: the same on every rank. *partial*: a summand on each.

    function                       forward                             backward
    copy_to_region                 whole x -> x                        partial gradients -> their sum, all-reduced
    reduce_from_region             partial x -> the sum, all-reduced   whole gradient -> itself
    scatter_to_region              whole [d] -> own part [d / n]       parts [d / n] -> [d], all-gathered
    gather_from_region             parts [d / n] -> [d], all-gathered  whole gradient [d] -> own part [d / n]
    all_gather_to_region           parts [d / n] -> [d], all-gathered  partial [d] -> own part of the sum
    reduce_scatter_from_region     partial [d] -> own part of the sum  parts [d / n] -> [d], all-gathered

Own part of the sum: by reduce-scatter. `gather_from_region` is for what every rank then computes alike,
`all_gather_to_region` for what each uses in another way (a column-parallel layer); taking one for the other gives
gradients n times too large or too small.

An all-reduce sends 2 (n - 1) / n of its tensor per rank, a reduce-scatter (n - 1) / n of its input, an all-gather
(n - 1) times its input. `tp` may be the mesh, an `Axis` already looked up, or None; with None or one rank nothing is
sent. Safe under `torch.compile`. The linear layers compute with the same collectives, but hide them behind products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import DeviceMesh

from parallel3d.layers.collectives import SEQUENCE_DIM, all_reduce, start_gather, start_reduce_scatter
from parallel3d.mesh import Axis

Tp = DeviceMesh | Axis | None
Change = Callable[[Tensor, Axis, int], Tensor]  # changes how a tensor lies over the axis; the number is the dim


def copy_to_region(x: Tensor, tp: Tp) -> Tensor:
    """Forward passes x on, which is the same on every rank. Backward sums the gradient over tp (all-reduce)."""
    return _apply(x, tp, 0, forward=_alias, backward=_sum)


def reduce_from_region(x: Tensor, tp: Tp) -> Tensor:
    """Forward sums x over tp (all-reduce). Backward passes the gradient on, which is the same on every rank."""
    return _apply(x, tp, 0, forward=_sum, backward=_same)


def scatter_to_region(x: Tensor, tp: Tp, dim: int = -1) -> Tensor:
    """Forward takes this rank's [..., d / n, ...] of [..., d, ...], the same on every rank, and sends nothing. Backward
    all-gathers. Raises ValueError where tp does not divide d."""
    return _apply(x, tp, dim, forward=_own_part, backward=_gathered, divides=True)


def gather_from_region(x: Tensor, tp: Tp, dim: int = -1) -> Tensor:
    """Forward all-gathers [..., d / n, ...] -> [..., d, ...]. Backward takes this rank's part of the gradient, which is
    the same on every rank, and sends nothing."""
    return _apply(x, tp, dim, forward=_gathered, backward=_own_part)


def all_gather_to_region(x: Tensor, tp: Tp, dim: int = SEQUENCE_DIM) -> Tensor:
    """Forward all-gathers [..., d / n, ...] -> [..., d, ...]. Backward reduce-scatters: this rank gets its part of the
    gradients' sum. Along the sequence it stands before a column-parallel layer."""
    return _apply(x, tp, dim, forward=_gathered, backward=_own_part_of_sum)


def reduce_scatter_from_region(x: Tensor, tp: Tp, dim: int = SEQUENCE_DIM) -> Tensor:
    """Forward reduce-scatters: [..., d, ...] -> this rank's [..., d / n, ...] of the sum over tp. Backward all-gathers.
    Along the sequence it stands after a row-parallel layer. Raises ValueError where tp does not divide d."""
    return _apply(x, tp, dim, forward=_own_part_of_sum, backward=_gathered, divides=True)


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns this rank's [..., d / n, ...] of a whole tensor, a view."""
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def _apply(x: Tensor, tp: Tp, dim: int, *, forward: Change, backward: Change, divides: bool = False) -> Tensor:
    axis = tp if isinstance(tp, Axis) else Axis.of(tp)
    if axis.size == 1:
        return x
    if divides and x.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of {list(x.shape)} cannot be split over tp = {axis.size}")
    y: Tensor = _Region.apply(x, axis, dim % x.ndim, forward, backward)
    return y


class _Region(Function):
    """Two changes that are each other's conjugate: one of the activation, one of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, forward: Change, backward: Change) -> Tensor:
        ctx.axis, ctx.dim, ctx.change = axis, dim, backward
        return forward(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.change(grad, ctx.axis, ctx.dim), None, None, None, None


def _alias(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.view_as(x)  # a function's output must not be its input


def _same(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x


def _sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return all_reduce(x.clone(), axis)  # cloned: others may hold x, too


def _own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return own_part(x, axis, dim).clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_gather(x, axis, dim).wait()


def _own_part_of_sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return start_reduce_scatter(x, axis, dim).wait()

"""Functions that change how a tensor is distributed over tp, each with its conjugate collective.

Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3) calls the first two f and g. Sequence
parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2) adds the all-gather and the
reduce-scatter.

Shapes: d is the size of the dim `dim`, n = tp. *full*: the same on every rank. *partial*: each rank
has a summand.

    function                       forward                             backward
    copy_to_region                 full x -> x                         partial gradients -> their sum, all-reduced
    reduce_from_region             partial x -> the sum, all-reduced   full gradient -> itself
    scatter_to_region              full [d] -> own part [d / n]        parts [d / n] -> [d], all-gathered
    gather_from_region             parts [d / n] -> [d], all-gathered  full gradient [d] -> own part [d / n]
    all_gather_to_region           parts [d / n] -> [d], all-gathered  partial [d] -> own part of the sum
    reduce_scatter_from_region     partial [d] -> own part of the sum  parts [d / n] -> [d], all-gathered
    all_to_all_of_region           x[r] goes to rank r                 gradients return to their senders

"Own part of the sum" is a reduce-scatter. Use `gather_from_region` if all ranks compute the same
thing from the result. Use `all_gather_to_region` if each rank uses it differently, as in a
column-parallel layer. With the wrong one, gradients are n times too large or too small.

An all-reduce sends 2 (n - 1) / n of its tensor per rank, a reduce-scatter (n - 1) / n of its input,
an all-gather (n - 1) times its input. `tp` is a mesh, an `Axis` or None. With None or one rank,
nothing is sent. `torch.compile` breaks the graph at a region. Linear layers use the same
collectives, but overlap them with matmuls.
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
# Collective, called as `change(x, axis, dim)`.
Change = Callable[[Tensor, Axis, int], Tensor]


def copy_to_region(x: Tensor, tp: Tp) -> Tensor:
    """Returns x unchanged. The backward pass all-reduces its gradient over tp.

    Args:
        x: Tensor that is the same on every rank.
        tp: Tensor-parallel axis.

    Returns:
        x, as input of column-parallel matmuls.
    """
    return _apply(x, tp, 0, forward=_alias, backward=_sum)


def reduce_from_region(x: Tensor, tp: Tp) -> Tensor:
    """All-reduces x over tp. The backward pass returns the gradient unchanged.

    Args:
        x: Partial sum, such as the output of a row-parallel matmul.
        tp: Tensor-parallel axis.

    Returns:
        The sum, the same on every rank.
    """
    return _apply(x, tp, 0, forward=_sum, backward=_alias)


def scatter_to_region(x: Tensor, tp: Tp, dim: int = -1) -> Tensor:
    """Returns this rank's part of x along `dim`. The backward pass all-gathers the gradient.

    Args:
        x: Tensor [..., d, ...] that is the same on every rank.
        tp: Tensor-parallel axis.
        dim: Dim to split.

    Returns:
        Tensor [..., d / n, ...].

    Raises:
        ValueError: tp does not divide d.
    """
    return _apply(x, tp, dim, forward=_own_part, backward=gather, divides=True)


def gather_from_region(x: Tensor, tp: Tp, dim: int = -1) -> Tensor:
    """All-gathers x along `dim`, for ranks that compute the same from the result.

    The backward pass returns this rank's part of the gradient.

    Args:
        x: Tensor [..., d / n, ...].
        tp: Tensor-parallel axis.
        dim: Dim to gather.

    Returns:
        Tensor [..., d, ...].
    """
    return _apply(x, tp, dim, forward=gather, backward=_own_part)


def all_gather_to_region(x: Tensor, tp: Tp, dim: int = SEQUENCE_DIM) -> Tensor:
    """All-gathers x along `dim`, by default the sequence, before a column-parallel layer.

    The backward pass reduce-scatters the gradient.

    Args:
        x: Tensor [..., d / n, ...].
        tp: Tensor-parallel axis.
        dim: Dim to gather.

    Returns:
        Tensor [..., d, ...].
    """
    return _apply(x, tp, dim, forward=gather, backward=reduce_scatter)


def reduce_scatter_from_region(x: Tensor, tp: Tp, dim: int = SEQUENCE_DIM) -> Tensor:
    """Reduce-scatters x along `dim`, by default the sequence, after a row-parallel layer.

    The backward pass all-gathers the gradient.

    Args:
        x: Partial sum [..., d, ...].
        tp: Tensor-parallel axis.
        dim: Dim to split.

    Returns:
        This rank's part [..., d / n, ...] of the sum.

    Raises:
        ValueError: tp does not divide d.
    """
    return _apply(x, tp, dim, forward=reduce_scatter, backward=gather, divides=True)


def all_to_all_of_region(x: Tensor, tp: Tp) -> Tensor:
    """Sends x[r] of x [n, ...] to rank r. Returns the received tensors, stacked in rank order."""
    return _apply(x, tp, 0, forward=_all_to_all, backward=_all_to_all)


def _apply(
    x: Tensor, tp: Tp, dim: int, *, forward: Change, backward: Change, divides: bool = False
) -> Tensor:
    axis = Axis.of(tp)
    if axis.size == 1:
        return x
    if divides and x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of shape {list(x.shape)} cannot be split over tp = {axis.size}; use a "
            f"multiple of {axis.size}"
        )
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
    return x.view_as(x)  # The output of a Function must not be its input.


def _all_to_all(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return all_to_all(x, axis)


def _sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    # The all-reduce may overwrite its input, which other code may still use.
    return all_reduce(x.clone(), axis)


def _own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return axis.part(x, dim).clone(memory_format=torch.contiguous_format)

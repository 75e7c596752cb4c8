"""The products of the linear layers with their collectives, forward and backward, as autograd functions: what overlaps
what is decided here. The shapes are those of `linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.layers.collectives import (
    Pending,
    all_reduce,
    gather_sequence,
    reduce_scatter_sequence,
    start_all_reduce,
    start_gather_sequence,
    start_reduce_scatter_sequence,
)
from parallel3d.layers.parameter import (
    accumulate_or_return,
    accumulate_or_return_product,
    accumulate_or_return_rows,
    local_tensor,
)
from parallel3d.mesh import Axis

if TYPE_CHECKING:
    from parallel3d.layers.linear import ColumnParallelLinear


def _own(parameter: Tensor, rows: slice | None) -> Tensor:
    """What this rank computes with of a parameter."""
    local = local_tensor(parameter)
    return local if rows is None else local[rows]


def padded_product(x: Tensor, weight: Tensor, width: int | None) -> Tensor:
    """x [..., I] times weight [O, I], filled up to [..., width] with -inf: multiplied into the wider rows at once."""
    features = weight.shape[0]
    if width is None or features == width:
        return F.linear(x, weight)
    if is_compiling():
        return F.pad(F.linear(x, weight), (0, width - features), value=float("-inf"))
    y = x.new_empty(*x.shape[:-1], width)
    flat = y.view(-1, width)
    torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=flat[:, :features])
    flat[:, features:] = float("-inf")
    return y


class ColumnParallelProduct(Function):
    """`parameters`: every layer's weight, then the biases that there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[ColumnParallelLinear], *parameters: Tensor) -> tuple[Tensor, ...]:
        first = layers[0]
        ctx.axis, ctx.sequence_parallel, ctx.fused = first.axis, first.sequence_parallel, first.fused_gradients
        ctx.save_for_backward(x)
        # Not saved: activation recompute would hand back copies, whose .grad nobody reads.
        ctx.weights = parameters[: len(layers)]
        biases = iter(parameters[len(layers) :])
        ctx.biases = [None if layer.bias is None else next(biases) for layer in layers]
        ctx.rows = [layer.rows for layer in layers]
        if ctx.sequence_parallel:
            x = gather_sequence(x, ctx.axis)
        if first.padded_width is not None and len(layers) == 1 and first.bias is None:
            return (padded_product(x, local_tensor(ctx.weights[0]), first.padded_width),)
        return tuple(
            F.linear(x, _own(weight, rows), None if bias is None else _own(bias, rows))
            for weight, bias, rows in zip(ctx.weights, ctx.biases, ctx.rows, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # The input is gathered again while its gradient is computed, and that travels while the weights' are.
        gathered = start_gather_sequence(x, ctx.axis) if ctx.sequence_parallel else Pending(lambda: x)
        weights = [_own(weight, rows) for weight, rows in zip(ctx.weights, ctx.rows, strict=True)]
        # [tokens, O / n], without what the output was filled up with.
        flat = [grad.flatten(0, -2)[:, : weight.shape[0]] for grad, weight in zip(grads, weights, strict=True)]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        travelling = (start_reduce_scatter_sequence if ctx.sequence_parallel else start_all_reduce)(grad_x, ctx.axis)
        del grad_x  # what travels is a copy, but for batches of one sequence
        x = gathered.wait().flatten(0, -2)
        del gathered  # likewise
        # Copied parts send their gradients here, and of two collectives under way the first has to end first.
        arrived = travelling.wait() if any(ctx.rows) else None
        given = []
        for weight, rows, grad in zip(ctx.weights, ctx.rows, flat, strict=True):
            if rows is None:
                given.append(accumulate_or_return_product(weight, grad, x, fused=ctx.fused))
            else:
                given.append(accumulate_or_return_rows(weight, rows, grad.t().mm(x), ctx.axis, fused=ctx.fused))
        for bias, rows, grad in zip(ctx.biases, ctx.rows, flat, strict=True):
            if bias is not None and rows is None:
                given.append(accumulate_or_return(bias, grad.sum(dim=0), fused=ctx.fused))
            elif bias is not None:
                given.append(accumulate_or_return_rows(bias, rows, grad.sum(dim=0), ctx.axis, fused=ctx.fused))
        return travelling.wait() if arrived is None else arrived, None, *given


class RowParallelProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence_parallel: bool, fused: bool) -> Tensor:
        ctx.axis, ctx.sequence_parallel, ctx.fused = axis, sequence_parallel, fused
        ctx.save_for_backward(x)
        ctx.weight = weight
        y = F.linear(x, local_tensor(weight))
        return reduce_scatter_sequence(y, axis) if sequence_parallel else all_reduce(y, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if ctx.sequence_parallel:
            grad = gather_sequence(grad, ctx.axis)
        grad_x = grad @ local_tensor(weight)
        grad_weight = accumulate_or_return_product(weight, grad.flatten(0, -2), x.flatten(0, -2), fused=ctx.fused)
        return grad_x, grad_weight, None, None, None

"""Linear layers split over tp: by columns (the output features) or by rows (the input features).

Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): a column-parallel layer followed by a row-parallel one
needs one collective in the forward and one in the backward. With sequence parallelism (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2) the all-reduce is taken apart into an all-gather and a reduce-scatter along the sequence, and
what lies between two such pairs is split along the sequence.

Shapes: B batch, S sequence, I input features, O output features, n = tp.

                column-parallel                         row-parallel
    weight      [O / n, I]                              [O, I / n]
    input       [B, S, I], or [B, S / n, I] (*)         [B, S, I / n]
    output      [B, S, O / n]                           [B, S, O], or [B, S / n, O] (*)
    forward     y = x W^T, (*) x gathered first         y = sum over tp of x W^T, (*) reduce-scattered
    backward    dx = sum over tp of dy W                dx = dy W, (*) dy gathered first
                    (*) reduce-scattered                dW = dy^T x
                dW = dy^T x, (*) x gathered again
    (*) sequence_parallel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import DeviceMesh
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
from parallel3d.layers.init import normal
from parallel3d.layers.parameter import (
    Initializer,
    ParallelModule,
    ParameterSpec,
    give_matmul_gradient,
    local_tensor,
)
from parallel3d.mesh import Axis

FUSED_FROM_ELEMENTS = 2**17  # where both ways took equally long on a CPU (docs/performance.md)


class ColumnParallelLinear(ParallelModule):
    """y = x W^T with the output features split over tp.

    x [batch, seq, in_features], or [batch, seq / tp, in_features] with `sequence_parallel`;
    y [batch, seq, out_features / tp]. Sends, per call: nothing forward and an all-reduce of x backward; with
    `sequence_parallel` an all-gather of x forward, another with a reduce-scatter backward.

    Raises ValueError where tp does not divide out_features.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        init: Initializer = normal(0.02),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        self.sequence_parallel = sequence_parallel
        self.add_parameter("weight", ParameterSpec((out_features, in_features), 0, init), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_parallel(x, [self])
        return y


class RowParallelLinear(ParallelModule):
    """y = x W^T with the input features split over tp, as a column-parallel layer leaves them.

    x [batch, seq, in_features / tp]; y [batch, seq, out_features], or [batch, seq / tp, out_features] with
    `sequence_parallel`. Sends, per call: an all-reduce of y forward and nothing backward; with `sequence_parallel` a
    reduce-scatter forward and an all-gather backward.

    Raises ValueError where tp does not divide in_features.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        init: Initializer = normal(0.02),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        self.sequence_parallel = sequence_parallel
        self.add_parameter("weight", ParameterSpec((out_features, in_features), 1, init), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(self):
            return F.linear(x, self.weight)
        y: Tensor = _RowParallel.apply(x, self.weight, self.axis, self.sequence_parallel, self.fused_gradients)
        return y


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """What each layer makes of the same x, for the collectives of one: q, k and v of an attention, gate and up of an
    MLP. The weights stay apart, because two packed along the split dimension could not be resharded."""
    first = layers[0]
    if all(is_plain(layer) for layer in layers):
        return tuple(F.linear(x, layer.weight) for layer in layers)
    weights = [layer.weight for layer in layers]
    outputs: tuple[Tensor, ...] = _ColumnParallel.apply(
        x, first.axis, first.sequence_parallel, first.fused_gradients, *weights
    )
    return outputs


def is_plain(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether torch's own linear does as well: nothing is split, and the weight is so small that the copy of its
    gradient, which fusing would save, costs less than a function in Python."""
    alone = layer.axis.size == 1
    return alone and (not layer.fused_gradients or layer.weight.numel() < FUSED_FROM_ELEMENTS)


class _ColumnParallel(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sequence_parallel: bool, fused: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.sequence_parallel, ctx.fused = axis, sequence_parallel, fused
        ctx.save_for_backward(x)
        ctx.weights = weights  # not saved: activation recompute would hand back copies, whose .grad nobody reads
        if sequence_parallel:
            x = gather_sequence(x, axis)
        return tuple(F.linear(x, local_tensor(weight)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        # The input is gathered again while its gradient is computed, and that travels while the weights' are.
        gathered = start_gather_sequence(x, ctx.axis) if ctx.sequence_parallel else Pending(lambda: x)
        flat = [grad.flatten(0, -2) for grad in grads]  # [tokens, O / n]
        grad_x = flat[0] @ local_tensor(weights[0])
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, local_tensor(weight))
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        travelling = (start_reduce_scatter_sequence if ctx.sequence_parallel else start_all_reduce)(grad_x, ctx.axis)
        x = gathered.wait().flatten(0, -2)
        weight_grads = [
            give_matmul_gradient(weight, grad, x, fused=ctx.fused) for weight, grad in zip(weights, flat, strict=True)
        ]
        return travelling.wait(), None, None, None, *weight_grads


class _RowParallel(Function):
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
        grad_weight = give_matmul_gradient(weight, grad.flatten(0, -2), x.flatten(0, -2), fused=ctx.fused)
        return grad_x, grad_weight, None, None, None

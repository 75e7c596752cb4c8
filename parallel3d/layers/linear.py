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

A bias of a column-parallel layer is split as the output is. That of a row-parallel one is whole on every rank and added
once, after the sum; under sequence parallelism each rank then sees other tokens, and its gradient is summed over tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.layers.collectives import (
    PendingTensor,
    all_reduce,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
)
from parallel3d.layers.init import normal, zeros
from parallel3d.layers.parameter import (
    Initializer,
    ParallelModule,
    ParameterSpec,
    accumulate_or_return,
    accumulate_or_return_product,
    accumulate_or_return_rows,
    local_tensor,
    replicated,
    traced,
)
from parallel3d.layers.placement import LayerTp
from parallel3d.layers.regions import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)

FUSED_FROM_ELEMENTS = 2**17  # where both ways took equally long on a CPU (docs/performance.md)


class ColumnParallelLinear(ParallelModule):
    """y = x W^T + b with the output features split over tp.

    x [batch, seq, in_features], or [batch, seq / tp, in_features] with `sequence_parallel`;
    y [batch, seq, out_features / tp], or [batch, seq, out_features] with `gather_output`. Sends, per call: nothing
    forward and an all-reduce of x backward; with `sequence_parallel` an all-gather of x forward, another with a
    reduce-scatter backward; with `gather_output` an all-gather of y forward.

    `copies` neighbouring ranks compute the same output features, out_features * copies / tp of them (keys and values
    of fewer heads than ranks). The weight is then whole on every rank, once in a checkpoint, and its gradient partial.

    Raises ValueError where tp does not divide out_features (tp / copies, where there are copies).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    uneven = False  # whether the last rank may have fewer output features
    padded_width: int | None = None  # the width of the output, where it is filled up with -inf

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: LayerTp = None,
        init: Initializer = normal(0.02),
        bias: bool = False,
        bias_init: Initializer = zeros,
        gather_output: bool = False,
        copies: int = 1,
    ) -> None:
        super().__init__(tp)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.rows = self._rows_of_copies(copies) if copies > 1 else None
        dim = 0 if self.rows is None else None
        is_copied = self.rows is not None
        self.add_parameter("weight", ParameterSpec((out_features, in_features), dim, init, is_copied, self.uneven))
        bias_spec = ParameterSpec((out_features,), dim, bias_init, is_copied, self.uneven)
        self.add_parameter("bias", bias_spec if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_parallel(x, (self,))
        return gather_from_region(y, self.axis) if self.gather_output else y

    def _rows_of_copies(self, copies: int) -> slice:
        n = self.axis.size
        if n % copies or self.out_features % (n // copies) or self.gather_output:
            raise ValueError(
                f"ColumnParallelLinear: {copies} copies of parts of {self.out_features} output features on tp = {n} "
                f"ranks: copies must divide tp, tp / copies the features, and the output is not gathered"
            )
        length = self.out_features * copies // n
        start = self.axis.rank // copies * length
        return slice(start, start + length)


class RowParallelLinear(ParallelModule):
    """y = x W^T + b with the input features split over tp, as a column-parallel layer leaves them.

    x [batch, seq, in_features / tp], or with `input_is_parallel=False` [batch, seq, in_features], the same on every
    rank, of which each takes its part; y [batch, seq, out_features], or [batch, seq / tp, out_features] with
    `sequence_parallel`. Sends, per call: an all-reduce of y forward and nothing backward; with `sequence_parallel` a
    reduce-scatter forward and an all-gather backward; where the input is whole an all-gather of its gradient.

    Raises ValueError where tp does not divide in_features.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: LayerTp = None,
        init: Initializer = normal(0.02),
        bias: bool = False,
        bias_init: Initializer = zeros,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__(tp)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.add_parameter("weight", ParameterSpec((out_features, in_features), 1, init))
        bias_spec = ParameterSpec((out_features,), None, bias_init, partial_gradient=self.sequence_parallel)
        self.add_parameter("bias", bias_spec if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.axis)
        if is_plain(self):
            return F.linear(x, self.weight, self.bias)
        if is_compiling():
            y = F.linear(x, traced(self.weight, self, "weight"))
            y = reduce_scatter_from_region(y, self.axis) if self.sequence_parallel else reduce_from_region(y, self.axis)
        else:
            y = RowParallelProduct.apply(x, self.weight, self)
        return y if self.bias is None else y + replicated(self.bias, self, "bias")


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Returns the output of each layer for the same x, and sends what one layer sends: for q, k and v of an attention,
    or gate and up of an MLP. The weights stay apart, because two packed along the split dim could not be resharded."""
    if all(is_plain(layer) for layer in layers):
        return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)
    if is_compiling():
        return _column_parallel_traced(x, layers)
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias is not None]
    outputs: tuple[Tensor, ...] = ColumnParallelProduct.apply(x, layers, *parameters)
    return outputs


def is_plain(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether torch's own linear computes the layer: nothing is split, and the weight is so small that the copy of its
    gradient, which fusing would save, costs less than a function in Python."""
    is_whole = layer.axis.size == 1
    return is_whole and (not layer.fused_gradients or layer.weight.numel() < FUSED_FROM_ELEMENTS or is_compiling())


def _column_parallel_traced(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    first = layers[0]
    x = all_gather_to_region(x, first.axis) if first.sequence_parallel else copy_to_region(x, first.axis)
    outputs = []
    for layer in layers:
        weight = traced(layer.weight, layer, "weight")
        bias = None if layer.bias is None else traced(layer.bias, layer, "bias")
        if layer.rows is not None:
            weight, bias = weight[layer.rows], None if bias is None else bias[layer.rows]
        outputs.append(F.linear(x, weight, bias))
    return tuple(outputs)


def padded_product(x: Tensor, weight: Tensor, width: int | None) -> Tensor:
    """Multiplies x [..., I] by weight [O, I] -> [..., width], filled up with -inf. The product is written into the
    wider rows, so that nothing is copied. Without a width the result is [..., O]."""
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
    """The products of column-parallel layers that share their input, with the collectives around them. `parameters` are
    every layer's weight, then the biases of those that have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[ColumnParallelLinear], *parameters: Tensor) -> tuple[Tensor, ...]:
        first = layers[0]
        ctx.axis, ctx.sequence_parallel, ctx.fused = first.axis, first.sequence_parallel, first.fused_gradients
        ctx.save_for_backward(x)
        # Not saved: activation recompute would hand back copies, whose .grad nobody reads.
        ctx.weights = parameters[: len(layers)]
        given_biases = iter(parameters[len(layers) :])
        ctx.biases = [None if layer.bias is None else next(given_biases) for layer in layers]
        ctx.rows, ctx.delayed = [layer.rows for layer in layers], first.delayed
        if ctx.sequence_parallel:
            x = start_gather(x, ctx.axis).wait()
        weights = _used_parts(ctx.weights, ctx.rows)
        if first.padded_width not in (None, len(weights[0])) and len(layers) == 1 and first.bias is None:
            return (padded_product(x, weights[0], first.padded_width),)
        biases = _used_parts(ctx.biases, ctx.rows)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # The input is gathered again while its gradient is computed, and that travels while the weights' are.
        gathered = start_gather(x, ctx.axis) if ctx.sequence_parallel else PendingTensor(lambda: x)
        weights = _used_parts(ctx.weights, ctx.rows)
        # [tokens, O / n], without the columns that the output was filled up with.
        flat = [grad.flatten(0, -2)[:, : weight.shape[0]] for grad, weight in zip(grads, weights, strict=True)]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        travelling = (start_reduce_scatter if ctx.sequence_parallel else start_all_reduce)(grad_x, ctx.axis)
        del grad_x  # what travels is a copy, unless the batch is one sequence; memory is freed here
        x = gathered.wait().flatten(0, -2)
        del gathered  # its memory is freed here as well
        # Copied parts send their gradients below, and of two collectives under way the first has to end first.
        arrived = travelling.wait() if any(ctx.rows) else None
        given = []
        for weight, rows, grad in zip(ctx.weights, ctx.rows, flat, strict=True):
            if rows is None:
                given.append(accumulate_or_return_product(weight, grad, x, fused=ctx.fused, delayed=ctx.delayed))
            else:
                given.append(accumulate_or_return_rows(weight, rows, grad.t().mm(x), ctx.axis, fused=ctx.fused))
        for bias, rows, grad in zip(ctx.biases, ctx.rows, flat, strict=True):
            if bias is not None and rows is None:
                given.append(accumulate_or_return(bias, grad.sum(dim=0), fused=ctx.fused))
            elif bias is not None:
                given.append(accumulate_or_return_rows(bias, rows, grad.sum(dim=0), ctx.axis, fused=ctx.fused))
        return travelling.wait() if arrived is None else arrived, None, *given


def _used_parts(parameters: Sequence[Tensor | None], rows: Sequence[slice | None]) -> list[Any]:
    """The plain tensors that this rank computes with: the local part of each parameter, or some rows of it."""
    local = [None if parameter is None else local_tensor(parameter) for parameter in parameters]
    return [part if part is None or used is None else part[used] for part, used in zip(local, rows, strict=True)]


class RowParallelProduct(Function):
    """The product of a row-parallel layer and the sum over tp after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RowParallelLinear) -> Tensor:
        ctx.axis, ctx.sequence_parallel, ctx.fused = layer.axis, layer.sequence_parallel, layer.fused_gradients
        ctx.save_for_backward(x)
        ctx.weight, ctx.delayed = weight, layer.delayed
        y = F.linear(x, local_tensor(weight))
        return start_reduce_scatter(y, ctx.axis).wait() if ctx.sequence_parallel else all_reduce(y, ctx.axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if ctx.sequence_parallel:
            grad = start_gather(grad, ctx.axis).wait()
        grad_x = grad @ local_tensor(weight)
        products = grad.flatten(0, -2), x.flatten(0, -2)
        grad_weight = accumulate_or_return_product(weight, *products, fused=ctx.fused, delayed=ctx.delayed)
        return grad_x, grad_weight, None

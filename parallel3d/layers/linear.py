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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.layers.collectives import (
    gather,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    sum_partial,
)
from parallel3d.layers.gradients import (
    accumulate_or_return,
    accumulate_or_return_product,
    local_tensor,
    refuse_function_transforms,
)
from parallel3d.layers.parameter import Initializer, LayerTp, ParallelModule, ParameterSpec, normal, zeros
from parallel3d.layers.regions import gather_from_region, scatter_to_region

FUSED_FROM_ELEMENTS = 2**17  # where both ways took equally long on a CPU (docs/performance.md)


class ColumnParallelLinear(ParallelModule, nn.Linear):
    """y = x W^T + b with the output features split over tp.

    x [batch, seq, in_features], or [batch, seq / tp, in_features] with `sequence_parallel`; y [batch, seq,
    out_features / tp], or with `gather_output`, which all-gathers y forward, [batch, seq, out_features].

    `copies` neighbouring ranks compute the same output features, out_features * copies / tp of them (keys and values
    of fewer heads than ranks). The weight is then whole on every rank, once in a checkpoint, and its gradient partial.

    Raises ValueError where tp does not divide out_features (tp / copies, where there are copies).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]
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
        self.rows: slice | None = None
        if copies > 1:
            n = self.axis.size
            if n % copies or out_features % (n // copies) or gather_output:
                raise ValueError(
                    f"ColumnParallelLinear: {copies} copies of parts of {out_features} output features on tp = {n} "
                    f"ranks: copies must divide tp, tp / copies the features, and the output is not gathered"
                )
            length, place = out_features * copies // n, self.axis.rank // copies
            self.rows = slice(place * length, (place + 1) * length)
        dim = None if copies > 1 else 0
        shape = (out_features, in_features)
        weight = ParameterSpec(shape, dim, init, partial_gradient=copies > 1, uneven=self.uneven)
        self.add_parameter("weight", weight)
        self.add_parameter("bias", replace(weight, shape=(out_features,), init=bias_init) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_parallel(x, (self,))
        return gather_from_region(y, self.axis) if self.gather_output else y


class RowParallelLinear(ParallelModule, nn.Linear):
    """y = x W^T + b with the input features split over tp, as a column-parallel layer leaves them.

    x [batch, seq, in_features / tp], or with `input_is_parallel=False` [batch, seq, in_features], the same on every
    rank, of which each takes its part and all-gathers the gradient; y [batch, seq, out_features], or [batch, seq / tp,
    out_features] with `sequence_parallel`.

    Raises ValueError where tp does not divide in_features.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]
    padded_width = None  # its output is never filled up

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
        whole_bias = ParameterSpec((out_features,), None, bias_init, partial_gradient=self.sequence_parallel)
        self.add_parameter("bias", whole_bias if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.axis)
        if is_plain(self):
            return F.linear(x, self.weight, self.bias)
        if is_compiling():
            y = self.leave(F.linear(x, self.traced("weight")))
        else:
            refuse_function_transforms()
            y = RowParallelProduct.apply(cast_input(x), self.weight, self)
        return y if self.bias is None else y + self.replicated("bias").to(y.dtype)


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Returns the output of each layer for the same x, and sends what one layer sends: for q, k and v of an attention,
    or gate and up of an MLP. The weights stay apart, because two packed along the split dim could not be resharded."""
    if all(is_plain(layer) for layer in layers):
        return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)
    if is_compiling():
        first, outputs = layers[0], []
        x = first.enter(x)
        for layer in layers:
            weight, bias = layer.traced("weight"), layer.traced("bias")
            if layer.rows is not None:
                weight, bias = weight[layer.rows], None if bias is None else bias[layer.rows]
            outputs.append(F.linear(x, weight, bias))
        return tuple(outputs)
    refuse_function_transforms()
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias is not None]
    products: tuple[Tensor, ...] = ColumnParallelProduct.apply(cast_input(x), layers, *parameters)
    return products


def is_plain(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Returns whether torch's own linear computes the layer: nothing is split or filled up, and the weight is so small
    that the copy of its gradient, which fusing would save, costs less than a function in Python."""
    if layer.axis.size > 1 or layer.padded_width not in (None, layer.out_features):
        return False
    return not layer.fused_gradients or layer.weight.numel() < FUSED_FROM_ELEMENTS or is_compiling()


def cast_input(x: Tensor) -> Tensor:
    """Returns the input of a layer in the type in which `torch.autocast` has its products computed, or as it is. The
    product itself casts the weight; the backward, in which autocast is off, has to do it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def padded_product(x: Tensor, weight: Tensor, width: int | None) -> Tensor:
    """Multiplies x [..., I] by weight [O, I] -> [..., width], filled up with -inf. The product is written into the
    wider rows, so that nothing is copied. Without a width the result is [..., O]."""
    features = weight.shape[0]
    if width is None or features == width:
        return F.linear(x, weight)
    if is_compiling() or x.dtype != weight.dtype:
        return F.pad(F.linear(x, weight), (0, width - features), value=float("-inf"))
    y = x.new_empty(*x.shape[:-1], width)
    flat = y.view(-1, width)
    torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=flat[:, :features])
    flat[:, features:].fill_(float("-inf"))  # an assignment would make a tensor of the CPU first
    return y


class ColumnParallelProduct(Function):
    """The products of column-parallel layers that share their input, with the collectives around them. `parameters` are
    every layer's weight, then the biases of those that have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[ColumnParallelLinear], *parameters: Tensor) -> tuple[Tensor, ...]:
        first = layers[0]
        ctx.layers = layers
        ctx.save_for_backward(x)
        # Not saved: activation recompute would hand back copies, whose .grad nobody reads.
        ctx.weights = parameters[: len(layers)]
        given_biases = iter(parameters[len(layers) :])
        ctx.biases = [None if layer.bias is None else next(given_biases) for layer in layers]
        if first.sequence_parallel:
            x = gather(x, first.axis)
        weights, biases = _used_parts(ctx.weights, layers), _used_parts(ctx.biases, layers)
        if first.padded_width not in (None, len(weights[0])) and len(layers) == 1 and first.bias is None:
            return (padded_product(x, weights[0], first.padded_width),)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layers, first = ctx.saved_tensors, ctx.layers, ctx.layers[0]
        axis, fused, delayed = first.axis, first.fused_gradients, first.delayed
        # The input is gathered again while its gradient is computed, and that travels while the weights' are.
        gathered = start_gather(x, axis) if first.sequence_parallel else lambda: x
        weights = [weight.to(x.dtype) for weight in _used_parts(ctx.weights, layers)]
        # [tokens, O / n], without the columns that the output was filled up with.
        flat = [grad.flatten(0, -2)[:, : weight.shape[0]] for grad, weight in zip(grads, weights, strict=True)]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        travelling = (start_reduce_scatter if first.sequence_parallel else start_all_reduce)(grad_x, axis)
        del grad_x  # what travels is a copy, unless the batch is one sequence; memory is freed here
        x = gathered().flatten(0, -2)
        del gathered  # its memory is freed here as well
        # Copied parts send their gradients below, and of two collectives under way the first has to end first.
        arrived = travelling() if any(layer.rows for layer in layers) else None
        given = []
        for weight, layer, grad in zip(ctx.weights, layers, flat, strict=True):
            if layer.rows is None:
                given.append(accumulate_or_return_product(weight, grad, x, fused=fused, delayed=delayed))
            else:
                given.append(accumulate_or_return(weight, grad.t().mm(x), fused=fused, rows=layer.rows, axis=axis))
        for bias, layer, grad in zip(ctx.biases, layers, flat, strict=True):
            if bias is not None:
                given.append(accumulate_or_return(bias, grad.sum(dim=0), fused=fused, rows=layer.rows, axis=axis))
        return travelling() if arrived is None else arrived, None, *given


def _used_parts(parameters: Sequence[Tensor | None], layers: Sequence[ColumnParallelLinear]) -> list[Any]:
    """Returns the plain tensors that this rank computes with: the local part of each parameter, or some rows of it."""
    local = [None if parameter is None else local_tensor(parameter) for parameter in parameters]
    pairs = zip(local, layers, strict=True)
    return [part if part is None or layer.rows is None else part[layer.rows] for part, layer in pairs]


class RowParallelProduct(Function):
    """The product of a row-parallel layer and the sum over tp after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RowParallelLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.layer = weight, layer
        return sum_partial(F.linear(x, local_tensor(weight)), layer.axis, scattered=layer.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, layer = ctx.saved_tensors, ctx.weight, ctx.layer
        if layer.sequence_parallel:
            grad = gather(grad, layer.axis)
        grad_x = grad @ local_tensor(weight).to(grad.dtype)
        products = grad.flatten(0, -2), x.flatten(0, -2)
        fused, delayed = layer.fused_gradients, layer.delayed
        return grad_x, accumulate_or_return_product(weight, *products, fused=fused, delayed=delayed), None

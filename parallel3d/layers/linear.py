"""Linear layers split over tp: by columns (the output features) or by rows (the input features).

Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): a column-parallel layer followed by
a row-parallel one needs one collective in the forward and one in the backward. With sequence
parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2) the all-reduce is taken apart
into an all-gather and a reduce-scatter along the sequence, and what lies between two such pairs is
split along the sequence.

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

A bias of a column-parallel layer is split as the output is. That of a row-parallel one is whole on
every rank and added once, after the sum; under sequence parallelism each rank then sees other
tokens, and its gradient is summed over tp.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d.layers.collectives import (
    gather,
    outside_graph,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    sum_partial,
)
from parallel3d.layers.gradients import (
    DelayedGradients,
    accumulate_or_return,
    accumulate_or_return_product,
    local_tensor,
)
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec, ShardedModule, zeros
from parallel3d.layers.regions import gather_from_region
from parallel3d.mesh import ONE_RANK
from parallel3d.shard_sizes import shard_rows
from parallel3d.torch_private import is_compiled

FUSED_FROM_ELEMENTS = 2**17  # where both ways took equally long on a CPU (docs/benchmarks.md)


class ColumnParallelLinear(ParallelModule, nn.Linear):
    """y = x W^T + b with the output features split over tp.

    x [batch, seq, in_features], or [batch, seq / tp, in_features] with `sequence_parallel`; y
    [batch, seq, out_features / tp], or with `gather_output`, which all-gathers y forward, [batch,
    seq, out_features].

    `copies` neighbouring ranks compute the same output features, out_features * copies / tp of them
    (keys and values of fewer heads than ranks). The weight is then whole on every rank, once in a
    checkpoint, and its gradient partial.

    Raises ValueError where tp does not divide out_features (tp / copies, where there are copies).

    Example:
        >>> up = parallel3d.ColumnParallelLinear(64, 256, tp=tp)
        >>> down = parallel3d.RowParallelLinear(256, 64, tp=tp)
        >>> y = down(F.gelu(up(x)))  # x, y [batch, seq, 64]
    """

    uneven = False  # the last rank may have fewer output features

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: LayerTp = None,
        bias: bool = False,
        gather_output: bool = False,
        copies: int = 1,
    ) -> None:
        super().__init__(tp)
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        shape = (out_features, in_features)
        init = self.context.init
        weight = ParameterSpec(shape, 0, init, uneven=self.uneven)
        if copies > 1:
            n = self.axis.size
            if n % copies or out_features % (n // copies):
                raise ValueError(f"copies = {copies}: must divide tp = {n}, and so many features")
            own = shard_rows(out_features, self.axis.rank // copies, n // copies)
            self.rows = slice(own.start, own.stop)
            weight = ParameterSpec(shape, None, init, partial_gradient=True)
        self.add_parameter("weight", weight)
        bias_spec = replace(weight, shape=(out_features,), init=zeros)
        self.add_parameter("bias", bias_spec if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_parallel(x, (self,))
        return gather_from_region(y, self.axis) if self.gather_output else y


class RowParallelLinear(ParallelModule, nn.Linear):
    """y = x W^T + b with the input features split over tp, as a column-parallel layer leaves them.

    x [batch, seq, in_features / tp]; y [batch, seq, out_features], or [batch, seq / tp,
    out_features] with `sequence_parallel`.

    Raises ValueError where tp does not divide in_features.

    Example:
        >>> up = parallel3d.ColumnParallelLinear(64, 256, tp=tp)
        >>> down = parallel3d.RowParallelLinear(256, 64, tp=tp)
        >>> y = down(F.gelu(up(x)))  # x, y [batch, seq, 64]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: LayerTp = None,
        bias: bool = False,
    ) -> None:
        super().__init__(tp)
        self.in_features = in_features
        self.out_features = out_features
        init = self.context.row_init or self.context.init
        self.add_parameter("weight", ParameterSpec((out_features, in_features), 1, init))
        whole_bias = ParameterSpec(
            (out_features,), None, zeros, partial_gradient=self.sequence_parallel
        )
        self.add_parameter("bias", whole_bias if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(x, self)


def column_parallel(x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the output of each layer for the same x, and sends what one layer sends: for q, k and
    v of an attention, or gate and up of an MLP. The weights stay apart, because two packed along
    the split dim could not be resharded."""
    if all(is_plain(layer) for layer in layers):
        return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    product = ColumnParallelProduct.apply
    outputs: tuple[Tensor, ...] = outside_graph(product, cast_input(x), layers, *weights, *biases)
    return outputs


def row_parallel(x: Tensor, layer: Any) -> Tensor:
    """Returns the output of a row-parallel layer."""
    if is_plain(layer):
        return F.linear(x, layer.weight, layer.bias)
    y: Tensor = outside_graph(RowParallelProduct.apply, cast_input(x), layer.weight, None, layer)
    return y if layer.bias is None else y + layer.replicated("bias").to(y.dtype)


def is_plain(layer: Any) -> bool:
    """Returns whether torch's own linear computes the layer: nothing is split or filled up, and the
    weight is so small that the copy of its gradient, which fusing would save, costs less than a
    function in Python."""
    if layer.axis.size > 1 or layer.padded_width not in (None, layer.out_features):
        return False
    return not layer.fused_gradients or layer.weight.numel() < FUSED_FROM_ELEMENTS or is_compiling()


def cast_input(x: Tensor) -> Tensor:
    """Returns the input of a layer in the type in which `torch.autocast` has its products computed,
    or as it is. The product itself casts the weight; the backward, in which autocast is off, has to
    do it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def padded_product(x: Tensor, weight: Tensor, width: int | None) -> Tensor:
    """Multiplies x [..., I] by weight [O, I] -> [..., width], filled up with -inf. The product
    is written into the wider rows, so that nothing is copied. Without a width the result is
    [..., O]."""
    features = len(weight)
    weight = weight.to(x.dtype)
    if width in (None, features):
        return F.linear(x, weight)
    y = x.new_empty(*x.shape[:-1], width)
    flat = y.view(-1, width)
    torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=flat[:, :features])
    flat[:, features:].fill_(float("-inf"))  # an assignment would make a tensor of the CPU first
    return y


class ColumnParallelProduct(Function):
    """The products of column-parallel layers that share their input, with the collectives around
    them. `parameters` are every layer's weight, then every layer's bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: Sequence[ColumnParallelLinear], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        first = layers[0]
        ctx.layers = layers
        ctx.save_for_backward(x)
        # Not saved: activation recompute would hand back copies, whose .grad nobody reads.
        ctx.weights = parameters[: len(layers)]
        ctx.biases = parameters[len(layers) :]
        if first.sequence_parallel:
            x = gather(x, first.axis)
        if first.padded_width is not None:
            weight = used_part(ctx.weights[0], first)
            return (padded_product(x, weight, first.padded_width),)
        outputs = []
        for layer, weight, bias in zip(layers, ctx.weights, ctx.biases, strict=True):
            outputs.append(F.linear(x, used_part(weight, layer), used_part(bias, layer)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layers, first = ctx.saved_tensors, ctx.layers, ctx.layers[0]
        # The input is gathered again while its gradient is computed, and that travels while the
        # weights' are.
        gathered = start_gather(x, first.axis) if first.sequence_parallel else lambda: x
        flat = []
        grad_x = None
        for layer, parameter, grad in zip(layers, ctx.weights, grads, strict=True):
            weight = used_part(parameter, layer).to(x.dtype)
            grad = grad.flatten(0, -2)  # [tokens, O / n]
            if layer.padded_width is not None:
                grad = grad[:, : len(weight)]  # without the columns that are filled up
            flat.append(grad)
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        assert grad_x is not None
        grad_x = grad_x.view(*grads[0].shape[:-1], grad_x.shape[-1])
        start = start_reduce_scatter if first.sequence_parallel else start_all_reduce
        travelling = start(grad_x, ONE_RANK if first.is_entered else first.axis)
        del grad_x  # what travels is a copy, unless the batch is one sequence; memory is freed here
        x = gathered().flatten(0, -2)
        del gathered  # its memory is freed here as well
        # Copied parts send their gradients below, and of two collectives under way the first has to
        # end first.
        arrived = travelling() if any(layer.rows for layer in layers) else None
        of_weights = []
        of_biases = []
        for layer, weight, bias, grad in zip(layers, ctx.weights, ctx.biases, flat, strict=True):
            of_weights.append(_weight_gradient(layer, weight, grad, x))
            of_biases.append(_bias_gradient(layer, bias, grad))
        return travelling() if arrived is None else arrived, None, *of_weights, *of_biases


def used_part(parameter: Tensor | None, layer: Any) -> Any:
    """Returns the plain tensor that this rank computes with, a weight as [out, in]."""
    if parameter is None:
        return None
    part = local_tensor(parameter)
    if layer.is_transposed:
        part = part.t()
    if layer.rows is not None:
        part = part[layer.rows]
    return part


def _weight_gradient(layer: Any, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Gives a weight the gradient of its product, of [tokens, out] and [tokens, in]."""
    fused = layer.fused_gradients
    if layer.rows is not None:
        rows = layer.rows
        axis = layer.axis
        return accumulate_or_return(weight, grad.t().mm(x), fused=fused, rows=rows, axis=axis)
    if layer.is_transposed:
        grad, x = x, grad
    return accumulate_or_return_product(weight, grad, x, fused=fused, delayed=layer.delayed)


def _bias_gradient(layer: Any, bias: Tensor | None, grad: Tensor) -> Tensor | None:
    if bias is None:
        return None
    fused = layer.fused_gradients
    rows = layer.rows
    return accumulate_or_return(bias, grad.sum(dim=0), fused=fused, rows=rows, axis=layer.axis)


class RowParallelProduct(Function):
    """The product of a row-parallel layer and the sum over tp after it. A bias is added before the
    sum: only a layer that is not split has one here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.bias = bias
        ctx.layer = layer
        y = F.linear(x, used_part(weight, layer), bias)
        return sum_partial(y, layer.axis, scattered=layer.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, layer = ctx.saved_tensors, ctx.weight, ctx.layer
        if layer.sequence_parallel:
            grad = gather(grad, layer.axis)
        grad = grad.contiguous()  # one matmul, not one for each sequence
        grad_x = grad @ used_part(weight, layer).to(grad.dtype)
        grad = grad.flatten(0, -2)
        of_weight = _weight_gradient(layer, weight, grad, x.flatten(0, -2))
        return grad_x, of_weight, _bias_gradient(layer, ctx.bias, grad), None


def delay_weight_gradients(module: nn.Module) -> DelayedGradients:
    """Lets the layers below a module, `nn.Linear`s among them, delay their weights' gradients.
    Returns what collects them until a second call. It changes no result and no name. A compiled
    module stays as it is: its backward is one piece, which is done in the first half."""
    whole_layer = ParallelModule(None)  # stands for each nn.Linear: nothing of it is split
    whole_layer.delayed = delayed = DelayedGradients()
    for part in _eager_modules(module):
        if type(part) is nn.Linear:
            vars(part).setdefault("forward", partial(_delaying_forward, part))
            vars(part)["whole_layer"] = whole_layer  # no child of the linear
        elif isinstance(part, ShardedModule):
            part.delayed = delayed
    return delayed


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and those below it, except compiled ones and all that is in them."""
    if not is_compiled(module):
        yield module
        for child in module.children():
            yield from _eager_modules(child)


def _delaying_forward(linear: Any, x: Tensor) -> Tensor:
    weight = linear.weight
    bias = linear.bias
    is_plain_leaf = weight.is_leaf and not isinstance(weight, DTensor)
    if not is_plain_leaf or not torch.is_grad_enabled() or x.ndim == 1:
        return F.linear(x, weight, bias)
    y: Tensor = RowParallelProduct.apply(cast_input(x), weight, bias, linear.whole_layer)
    return y

"""Linear layers split over tp: by columns (output features) or by rows (input features).

A column-parallel layer followed by a row-parallel one needs one collective in the forward pass and
one in the backward pass (Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053, section 3). Sequence
parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2) replaces each all-reduce with
an all-gather and a reduce-scatter along the sequence. Activations between such pairs of layers are
then split along the sequence.

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

The bias of a column-parallel layer is split like its output. The bias of a row-parallel layer is
replicated and added once, after the sum. Under sequence parallelism each rank sees different tokens,
so the gradient of that bias is all-reduced over tp.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
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
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec, ShardedModule, zeros
from parallel3d.layers.regions import gather_from_region
from parallel3d.layers.weight_gradients import (
    DelayedGradients,
    accumulate_or_return,
    accumulate_or_return_product,
    local_tensor,
)
from parallel3d.mesh import ONE_RANK
from parallel3d.shard_sizes import shard_rows
from parallel3d.torch_private import is_compiled

# Fused gradients are faster from this number of elements on, measured on a CPU
# (docs/benchmarks.md).
FUSED_FROM_ELEMENTS = 2**17


class ColumnParallelLinear(ParallelModule, nn.Linear):
    """Linear layer y = x W^T + b with its output features split over tp.

    Shapes: x [batch, seq, in_features], or [batch, seq / tp, in_features] under sequence
    parallelism. y [batch, seq, out_features / tp], or [batch, seq, out_features] with
    `gather_output`.

    Communication: without sequence parallelism, one all-reduce of dx in the backward pass. With it,
    one all-gather of x in the forward pass; an all-gather of x and a reduce-scatter of dx in the
    backward pass.

    Args:
        in_features: Size of each input vector.
        out_features: Size of each output vector over all ranks. tp must divide it.
        tp: Tensor-parallel axis or a `ParallelContext`.
        bias: If True, adds a bias, sharded or replicated like the weight.
        gather_output: If True, all-gathers y in the forward pass.
        copies: Number of neighboring ranks that compute the same out_features * copies / tp
            features. Used for keys and values if there are fewer heads than ranks. The weight is
            then replicated, stored once in a checkpoint, and its gradient is summed over tp.

    Raises:
        ValueError: `copies` does not divide tp, or tp / copies does not divide `out_features`.

    Example:
        >>> up = parallel3d.ColumnParallelLinear(64, 256, tp=tp)
        >>> down = parallel3d.RowParallelLinear(256, 64, tp=tp)
        >>> y = down(F.gelu(up(x)))  # x, y [batch, seq, 64]
    """

    uneven = False  # If True, the last ranks may have fewer output features.

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
                raise ValueError(
                    f"copies = {copies}: must divide tp = {n}, and tp / copies must divide "
                    f"out_features = {out_features}; use copies = 1 or another tp"
                )
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
    """Linear layer y = x W^T + b with its input features split over tp.

    Its input is the output of a column-parallel layer.

    Shapes: x [batch, seq, in_features / tp]. y [batch, seq, out_features], or [batch, seq / tp,
    out_features] under sequence parallelism.

    Communication: one all-reduce of y in the forward pass. Under sequence parallelism, a
    reduce-scatter of y in the forward pass and an all-gather of dy in the backward pass.

    Args:
        in_features: Size of each input vector over all ranks. tp must divide it.
        out_features: Size of each output vector.
        tp: Tensor-parallel axis or a `ParallelContext`.
        bias: If True, adds a bias after the sum over tp.

    Raises:
        ValueError: tp does not divide `in_features`.

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
    """Returns the output of each layer for the same x, with the communication of one layer.

    Used for q, k and v of an attention, and for gate and up of an MLP. The weights stay separate,
    because two weights packed along the sharded dim could not be resharded.
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    if all(map(is_plain, layers, weights)):
        return tuple(map(F.linear, repeat(x), weights, biases))
    product = ColumnParallelProduct.apply
    outputs: tuple[Tensor, ...] = outside_graph(product, cast_input(x), layers, *weights, *biases)
    return outputs


def row_parallel(x: Tensor, layer: Any) -> Tensor:
    weight = layer.weight
    if is_plain(layer, weight):
        return F.linear(x, weight, layer.bias)
    y: Tensor = outside_graph(RowParallelProduct.apply, cast_input(x), weight, None, layer)
    return y if layer.bias is None else y + layer.replicated("bias").to(y.dtype)


def is_plain(layer: Any, weight: Tensor) -> bool:
    """Returns True if torch's own linear can compute the layer.

    A sharded or padded layer needs `ColumnParallelProduct` or `RowParallelProduct`. So does a layer
    with fused gradients, unless `torch.compile` traces it or its weight is small. For a small
    weight, adding the gradient to `main_grad` costs less than an autograd function in Python.
    """
    if layer.axis.size > 1 or layer.padded_width not in (None, layer.out_features):
        return False
    return not layer.fused_gradients or weight.numel() < FUSED_FROM_ELEMENTS or is_compiling()


def flat_tokens(x: Tensor, layer: Any) -> Tensor:
    """Flattens x [batch, seq, hidden] to [tokens, hidden], unless the layer gathers the sequence.

    For an input of two dims, `F.linear` adds no views to the autograd graph.
    """
    return x if layer.sequence_parallel else x.flatten(0, -2)


def cast_input(x: Tensor) -> Tensor:
    """Casts the input to the dtype of `torch.autocast` if autocast is on. Leaves float64 unchanged.

    The matmul casts the weight. Autocast is off in the backward pass, so the input saved for it
    must be cast here.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def padded_product(x: Tensor, weight: Tensor, width: int | None) -> Tensor:
    """Multiplies x [..., I] by weight [O, I] and pads the result with -inf to [..., width].

    The matmul writes directly into the padded result, so nothing is copied. Without `width` the
    result is [..., O].
    """
    features = len(weight)
    weight = weight.to(x.dtype)
    if width in (None, features):
        return F.linear(x, weight)
    y = x.new_empty(*x.shape[:-1], width)
    flat = y.view(-1, width)
    torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out=flat[:, :features])
    # Assigning a float would first create a tensor on the CPU.
    flat[:, features:].fill_(float("-inf"))
    return y


class ColumnParallelProduct(Function):
    """Matmuls of column-parallel layers that share their input, with their collectives.

    `parameters` are the weights of all layers, then their biases.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: Sequence[ColumnParallelLinear], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        first = layers[0]
        ctx.layers = layers
        ctx.save_for_backward(x)
        # Not saved: activation recompute would return copies, and their .grad would be lost.
        ctx.weights = parameters[: len(layers)]
        ctx.biases = parameters[len(layers) :]
        if first.sequence_parallel:
            x = gather(x, first.axis)
        if first.padded_width is not None:
            weight = used_part(ctx.weights[0], first)
            return (padded_product(x, weight, first.padded_width),)
        outputs = []
        for layer, weight, bias in zip(layers, ctx.weights, ctx.biases, strict=True):
            used_bias = None if bias is None else used_part(bias, layer)
            outputs.append(F.linear(x, used_part(weight, layer), used_bias))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layers, first = ctx.saved_tensors, ctx.layers, ctx.layers[0]
        # The all-gather of the input overlaps with the matmul of its gradient. The reduction of
        # that gradient overlaps with the matmuls of the weight gradients.
        gathered = start_gather(x, first.axis) if first.sequence_parallel else lambda: x
        flat_grads = []
        grad_x = None
        for layer, parameter, grad in zip(layers, ctx.weights, grads, strict=True):
            weight = used_part(parameter, layer).to(x.dtype)
            grad = grad.flatten(0, -2)  # [tokens, O / n]
            if layer.padded_width is not None:
                grad = grad[:, : len(weight)]  # Drop the padding columns.
            flat_grads.append(grad)
            grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        assert grad_x is not None
        grad_x = grad_x.view(*grads[0].shape[:-1], grad_x.shape[-1])
        start = start_reduce_scatter if first.sequence_parallel else start_all_reduce
        wait_for_grad_x = start(grad_x, ONE_RANK if first.is_entered else first.axis)
        # A reduce-scatter of several sequences sends a copy, so this frees the original.
        del grad_x
        x = gathered().flatten(0, -2)
        del gathered  # Frees the buffer of the all-gather.
        # Replicated weights all-reduce their gradients below. Wait for the first collective before
        # starting another.
        waits_first = any(layer.rows is not None for layer in layers)
        if waits_first:
            grad_x = wait_for_grad_x()
        weight_grads = []
        bias_grads = []
        for layer, weight, bias, grad in zip(
            layers, ctx.weights, ctx.biases, flat_grads, strict=True
        ):
            weight_grads.append(_weight_gradient(layer, weight, grad, x))
            bias_grads.append(None if bias is None else _bias_gradient(layer, bias, grad))
        if not waits_first:
            grad_x = wait_for_grad_x()
        return grad_x, None, *weight_grads, *bias_grads


def used_part(parameter: Tensor, layer: Any) -> Tensor:
    """Returns the plain tensor that this rank computes with. A weight is [out, in]."""
    part = local_tensor(parameter)
    if layer.is_transposed:
        part = part.t()
    if layer.rows is not None:
        part = part[layer.rows]
    return part


def _weight_gradient(layer: Any, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Computes the weight gradient from dy [tokens, out] and x [tokens, in]."""
    fused = layer.fused_gradients
    if layer.rows is not None:
        rows = layer.rows
        axis = layer.axis
        return accumulate_or_return(weight, grad.t().mm(x), fused=fused, rows=rows, axis=axis)
    if layer.is_transposed:
        grad, x = x, grad
    return accumulate_or_return_product(weight, grad, x, fused=fused, delayed=layer.delayed)


def _bias_gradient(layer: Any, bias: Tensor, grad: Tensor) -> Tensor | None:
    fused = layer.fused_gradients
    rows = layer.rows
    return accumulate_or_return(bias, grad.sum(dim=0), fused=fused, rows=rows, axis=layer.axis)


class RowParallelProduct(Function):
    """Matmul of a row-parallel layer, followed by the sum over tp.

    A bias passed here is added before the sum, so only an unsharded layer passes one.
    """

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
        grad = grad.contiguous()  # One matmul instead of one per sequence.
        grad_x = grad @ used_part(weight, layer).to(grad.dtype)
        grad = grad.flatten(0, -2)
        weight_grad = _weight_gradient(layer, weight, grad, x.flatten(0, -2))
        bias_grad = None if ctx.bias is None else _bias_gradient(layer, ctx.bias, grad)
        return grad_x, weight_grad, bias_grad, None


def delay_weight_gradients(module: nn.Module) -> DelayedGradients:
    """Lets all linear layers below a module, including `nn.Linear`, defer their weight gradients.

    Returns the object that collects the deferred gradients. Results and parameter names do not
    change. Compiled modules are skipped: their backward pass cannot be split.
    """
    # Provides the attributes of an unsharded layer, which nn.Linear lacks.
    whole_layer = ParallelModule(None)
    whole_layer.delayed = delayed = DelayedGradients()
    for part in _eager_modules(module):
        if type(part) is nn.Linear:
            vars(part).setdefault("forward", partial(_delaying_forward, part))
            # Via `vars`, so that it is not registered as a child module.
            vars(part)["whole_layer"] = whole_layer
        elif isinstance(part, ShardedModule):
            part.delayed = delayed
    return delayed


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and its descendants, except compiled modules and everything inside them."""
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

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

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.layers.init import normal, zeros
from parallel3d.layers.linear_autograd import ColumnParallelProduct, RowParallelProduct
from parallel3d.layers.parameter import Initializer, ParallelModule, ParameterSpec, replicated, traced
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
    `async_tp` (the all-gather taken apart and hidden behind the product) is refused: see `refuse_async_tp`.

    Raises ValueError where tp does not divide out_features (tp / copies, where there are copies).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    uneven = False  # whether the last rank may have fewer output features
    padded_width: int | None = None  # of the output, where it is filled up with -inf

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        init: Initializer = normal(0.02),
        bias: bool = False,
        bias_init: Initializer = zeros,
        gather_output: bool = False,
        copies: int = 1,
        async_tp: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        refuse_async_tp(async_tp)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.gather_output = gather_output
        self.rows = self._rows_of_copies(copies) if copies > 1 else None
        dim = 0 if self.rows is None else None
        partial = self.rows is not None
        spec = ParameterSpec((out_features, in_features), dim, init, partial_gradient=partial, uneven=self.uneven)
        self.add_parameter("weight", spec, device=device, dtype=dtype)
        if bias:
            spec = ParameterSpec((out_features,), dim, bias_init, partial_gradient=partial, uneven=self.uneven)
            self.add_parameter("bias", spec, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)

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
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        init: Initializer = normal(0.02),
        bias: bool = False,
        bias_init: Initializer = zeros,
        input_is_parallel: bool = True,
        async_tp: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        refuse_async_tp(async_tp)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.input_is_parallel = input_is_parallel
        self.add_parameter("weight", ParameterSpec((out_features, in_features), 1, init), device=device, dtype=dtype)
        if bias:
            spec = ParameterSpec((out_features,), None, bias_init, partial_gradient=sequence_parallel)
            self.add_parameter("bias", spec, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.axis)
        if is_plain(self):
            return F.linear(x, self.weight, self.bias)
        if is_compiling():
            y = F.linear(x, traced(self.weight, self, "weight"))
            y = reduce_scatter_from_region(y, self.axis) if self.sequence_parallel else reduce_from_region(y, self.axis)
        else:
            y = RowParallelProduct.apply(x, self.weight, self.axis, self.sequence_parallel, self.fused_gradients)
        return y if self.bias is None else y + replicated(self.bias, self, "bias")


def refuse_async_tp(wanted: bool) -> None:
    """Raises ValueError: overlap inside one product needs memory that all GPUs of the axis can write to."""
    if wanted:
        raise ValueError(
            "async_tp = True: taking a collective apart and hiding it behind its product needs CUDA's symmetric "
            "memory, which this version does not use; leave it False. The input gradient's collective overlaps the "
            "weight gradient's product without it"
        )


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """What each layer makes of the same x, for the collectives of one: q, k and v of an attention, gate and up of an
    MLP. The weights stay apart, because two packed along the split dimension could not be resharded."""
    if all(is_plain(layer) for layer in layers):
        return tuple(F.linear(x, layer.weight, layer.bias) for layer in layers)
    if is_compiling():
        return _column_parallel_traced(x, layers)
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias is not None]
    outputs: tuple[Tensor, ...] = ColumnParallelProduct.apply(x, layers, *parameters)
    return outputs


def is_plain(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether torch's own linear does as well: nothing is split, and the weight is so small that the copy of its
    gradient, which fusing would save, costs less than a function in Python."""
    alone = layer.axis.size == 1
    return alone and (not layer.fused_gradients or layer.weight.numel() < FUSED_FROM_ELEMENTS or is_compiling())


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

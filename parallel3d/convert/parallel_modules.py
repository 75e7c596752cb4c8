"""Classes that `convert.apply` adds to the class of a module at run time, as `fully_shard` does.

Their forward pass works on this rank's shards. Each docstring lists the communication. Shapes: B
batch, S sequence, I input features, O output features, n = tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.layers.collectives import SEQUENCE_DIM
from parallel3d.layers.linear import FUSED_FROM_ELEMENTS, column_parallel, row_parallel
from parallel3d.layers.parameter import ShardedModule
from parallel3d.layers.regions import (
    all_to_all_of_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from parallel3d.layers.vocabulary import vocab_parallel_lookup
from parallel3d.mesh import Axis
from parallel3d.shard_sizes import largest_shard


class ColumnParallel(ShardedModule):
    """Linear layer with split output features: [B, S, I] -> [B, S, O / n].

    With `gather_output` the output is [B, S, O], all-gathered in the forward pass. dx is
    all-reduced in the backward pass, unless a parent module does so.
    """

    weight: Tensor
    features: int  # Number of output features over all ranks.
    gather_output: bool = False

    def forward(self, x: Tensor) -> Tensor:
        is_small = self.weight.numel() < FUSED_FROM_ELEMENTS
        if self.is_entered and is_small and self.delayed is None:
            # Nothing is sent, and torch's linear takes less time than `column_parallel`.
            weight = self.replicated("weight")
            y = F.linear(x, weight.t() if self.is_transposed else weight, self.replicated("bias"))
        else:
            (y,) = column_parallel(x, (self,))
        if not self.gather_output:
            return y
        # The last ranks may have fewer features.
        width = largest_shard(self.features, self.axis.size)
        padded = F.pad(y, (0, width - y.shape[-1]))
        return gather_from_region(padded, self.axis)[..., : self.features]


class PackedColumnParallel(ShardedModule):
    """Column-parallel layer whose weight packs several matrices, or has heads that ranks share.

    An all-to-all exchanges the weight shard in the forward pass and its gradient in the backward
    pass. See [Note: packed weights] in `convert.apply`.
    """

    # Output features and number of distinct shards of each matrix. The latter is below tp if
    # neighboring ranks compute the same shard.
    packed: Sequence[tuple[int, int]]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.replicated("weight")
        bias = self.replicated("bias")
        shard = weight if self.is_transposed else weight.t()  # [I / n, O]
        sent = self._by_rank(shard).transpose(0, 1)  # [n, I / n, O / n]
        own = all_to_all_of_region(sent, self.axis).flatten(0, 1)  # [I, O / n]
        if bias is not None:
            bias = self._by_rank(copy_to_region(bias, self.axis))[self.axis.rank]
        return F.linear(self.enter(x), own.t(), bias)

    def _by_rank(self, full: Tensor) -> Tensor:
        """Splits [..., O] into [..., n, O / n] by the rank that computes the features."""
        pieces = []
        sizes = [features for features, _ in self.packed]
        for piece, (_, shares) in zip(full.split(sizes, -1), self.packed, strict=True):
            copies = self.axis.size // shares
            piece = piece.unflatten(-1, (shares, -1))
            pieces.append(piece.repeat_interleave(copies, -2) if copies > 1 else piece)
        return torch.cat(pieces, -1)


class RowParallel(ShardedModule):
    """Linear layer with split input features: [B, S, I / n] -> [B, S, O].

    y is all-reduced in the forward pass. With `sequence_parallel` the output is [B, S / n, O]: y is
    reduce-scattered in the forward pass, and dy all-gathered in the backward pass. The bias is
    added after the sum.
    """

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(x, self)

    def sums_gradient(self, name: str) -> bool:
        return self.sequence_parallel  # Each rank adds the bias to its own tokens.


# Derives from nn.Embedding, so that in the MRO it can come after a model's own subclass.
class VocabParallel(ShardedModule, nn.Embedding):
    """Embedding with split rows: ids [B, S] -> [B, S, D], all-reduced in the forward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        y = vocab_parallel_lookup(ids, self)
        if self.padding_idx is None:
            return y
        is_padding = (ids == self.padding_idx).unsqueeze(-1)
        return torch.where(is_padding, y.detach(), y)  # The row of the padding id gets no gradient.


class Replicated(ShardedModule):
    """Module that is replicated on every rank.

    Its parameters are DTensors, and plain tensors during the forward pass. With `partial_gradient`,
    parameter gradients are all-reduced. With `gather_sequence`, the output [B, S / n, D] is
    all-gathered.
    """

    partial_gradient: bool = False
    gather_sequence: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtensors = dict(self._parameters)
        try:
            for name in dtensors:
                self._parameters[name] = self.replicated(name)
            y = super().forward(*args, **kwargs)
        finally:
            self._parameters.update(dtensors)
        return gather_from_region(y, self.axis, SEQUENCE_DIM) if self.gather_sequence else y

    def sums_gradient(self, name: str) -> bool:
        return self.partial_gradient


class ConvertedExperts(Replicated):
    """Experts of a mixture of experts, split over ranks.

    Inputs are tokens [T, D], and the global expert indices and routing weights [T, k] of each
    token. The output [T, D] is all-reduced in the forward pass, and the gradients of tokens and
    routing weights in the backward pass. Experts of other ranks get weight 0 and an index that
    Hugging Face's experts skip.
    """

    count: int  # Number of experts over all ranks.

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = self.axis.rows(self.count)
        elsewhere = (chosen < own.start) | (chosen >= own.stop)
        chosen = (chosen - own.start).masked_fill(elsewhere, len(own))
        weights = copy_to_region(weights, self.axis).masked_fill(elsewhere, 0.0)
        y = super().forward(copy_to_region(x, self.axis), chosen, weights)
        return reduce_from_region(y, self.axis)


class EnterRegion(Replicated):
    """Module whose input is read by several column-parallel layers.

    dx is all-reduced in the backward pass. With `sequence_parallel` the input is [B, S / n, D]: it
    is all-gathered in the forward pass, and dx reduce-scattered in the backward pass.
    """

    argument: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self.enter(args[0]), *args[1:])
        else:
            kwargs[self.argument] = self.enter(kwargs[self.argument])
        return super().forward(*args, **kwargs)


class ScatterSequence(EnterRegion):
    """Module that takes its part [B, S / n, D] of a replicated input [B, S, D].

    dx is all-gathered in the backward pass.
    """

    def enter(self, x: Tensor) -> Tensor:
        return scatter_to_region(x, self.axis, SEQUENCE_DIM)


def add_class(module: nn.Module, kind: type[ShardedModule], axis: Axis, **settings: Any) -> None:
    """Gives a module a new class, derived from its own and `kind`. Parameters and hooks stay.

    In the MRO, `VocabParallel` comes after a class that changes the result of torch's embedding,
    such as Gemma's.
    """
    module.__class__ = _parallel_class(kind, type(module))  # type: ignore[arg-type]
    for name, value in {"axis": axis, "is_transposed": is_conv1d(module), **settings}.items():
        setattr(module, name, value)


@cache  # `torch.compile` compiles once per class.
def _parallel_class(kind: type[ShardedModule], own: type[nn.Module]) -> type[nn.Module]:
    is_below = kind is VocabParallel and own.forward is not nn.Embedding.forward
    bases = (own, kind) if is_below else (kind, own)
    return type(f"TensorParallel{own.__name__}", bases, {})


def is_linear(module: nn.Module) -> bool:
    """Returns True for torch's linear layer, Hugging Face's Conv1D, and equivalents."""
    is_torch = type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear"
    return is_torch or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Returns True for Hugging Face's Conv1D, a linear layer with a transposed weight.

    Checks the class name and an attribute, so that transformers need not be installed.
    """
    has_name = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return has_name and hasattr(module, "nf")

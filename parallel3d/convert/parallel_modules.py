"""Classes that `convert.apply` puts on top of a module's own class, as `fully_shard` does. Their
forward works on this rank's part of the parameters.

Shapes: B batch, S sequence, I input features, O output features, n = tp. The docstring of each
class says what it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.layers.collectives import SEQUENCE_DIM
from parallel3d.layers.linear import column_parallel, row_parallel
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
    """A linear layer of this rank's output features: [B, S, I] -> [B, S, O / n], or [B, S, O] with
    `gather_output`. Sends nothing forward, except for an all-gather of y with `gather_output`.
    All-reduces dx backward, unless a module around it does."""

    features: int  # output features of all ranks
    gather_output: bool = False

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_parallel(x, (self,))
        if not self.gather_output:
            return y
        width = largest_shard(self.features, self.axis.size)  # the last ranks may have fewer
        padded = F.pad(y, (0, width - y.shape[-1]))
        return gather_from_region(padded, self.axis)[..., : self.features]


class PackedColumnParallel(ShardedModule):
    """A column-parallel layer whose weight has several matrices side by side, or one of heads that
    ranks share: [Note: packed weights] in `convert.apply`. All-to-all of the weight's shard
    forward, and of its gradient backward."""

    # of each matrix the output features and the distinct shards: tp, or fewer if neighbouring
    # ranks compute the same one
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
        """Splits [..., O] into [..., n, O / n], the output features that each rank computes."""
        pieces = []
        sizes = [features for features, _ in self.packed]
        for piece, (_, shares) in zip(full.split(sizes, -1), self.packed, strict=True):
            copies = self.axis.size // shares
            piece = piece.unflatten(-1, (shares, -1))
            pieces.append(piece.repeat_interleave(copies, -2) if copies > 1 else piece)
        return torch.cat(pieces, -1)


class RowParallel(ShardedModule):
    """A linear layer of this rank's input features: [B, S, I / n] -> [B, S, O]. All-reduces y
    forward; sends nothing backward. With `sequence_parallel` -> [B, S / n, O]: reduce-scatters y
    forward, all-gathers dy backward. The bias is added after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(x, self)

    def sums_gradient(self, name: str) -> bool:
        return self.sequence_parallel  # each rank adds the bias to its own tokens


# An nn.Embedding, so that it comes between torch's class and one of a model.
class VocabParallel(ShardedModule, nn.Embedding):
    """A look-up in this rank's rows: ids [B, S] -> [B, S, D]. All-reduces y forward; sends nothing
    backward."""

    def forward(self, ids: Tensor) -> Tensor:
        y = vocab_parallel_lookup(ids, self)
        if self.padding_idx is None:
            return y
        is_padding = (ids == self.padding_idx).unsqueeze(-1)
        return torch.where(is_padding, y.detach(), y)  # its row does not learn


class Replicated(ShardedModule):
    """A module that every rank has whole. During its forward its parameters are plain tensors; at
    any other time they are DTensors.

    With `partial_gradient` the gradients of the parameters are all-reduced. With `gather_sequence`
    the output [B, S / n, D] is all-gathered."""

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


class ParallelExperts(Replicated):
    """Experts of a mixture of experts, of which this rank has some: tokens [T, D], the experts of
    each [T, k], counted over all ranks, and their weights [T, k] -> [T, D]. All-reduces y forward,
    and dx and the gradient of the weights backward. Choices of another rank's experts get the
    number that transformers' forward leaves out, and weight 0."""

    count: int  # experts of all ranks

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = self.axis.rows(self.count)
        elsewhere = (chosen < own.start) | (chosen >= own.stop)
        chosen = (chosen - own.start).masked_fill(elsewhere, len(own))
        weights = copy_to_region(weights, self.axis).masked_fill(elsewhere, 0.0)
        y = super().forward(copy_to_region(x, self.axis), chosen, weights)
        return reduce_from_region(y, self.axis)


class EnterRegion(Replicated):
    """A module whose input several column-parallel layers read. Sends nothing forward; all-reduces
    dx backward. With `sequence_parallel` the input is [B, S / n, D]: all-gathered forward, dx
    reduce-scattered backward."""

    argument: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self.enter(args[0]), *args[1:])
        else:
            kwargs[self.argument] = self.enter(kwargs[self.argument])
        return super().forward(*args, **kwargs)


class ScatterSequence(EnterRegion):
    """A module that works on [B, S / n, D] of its input [B, S, D]. Sends nothing forward;
    all-gathers dx backward."""

    def enter(self, x: Tensor) -> Tensor:
        return scatter_to_region(x, self.axis, SEQUENCE_DIM)


def add_class(module: nn.Module, kind: type[ShardedModule], axis: Axis, **settings: Any) -> None:
    """Puts a class on top of the module's own. The object, its parameters and its hooks stay.

    A vocabulary-parallel look-up goes below a class of embeddings that changes the result of
    torch's look-up, as Gemma's does."""
    own = type(module)
    is_below = kind is VocabParallel and own.forward is not nn.Embedding.forward
    bases = (own, kind) if is_below else (kind, own)
    module.__class__ = type(f"TensorParallel{own.__name__}", bases, {})
    for name, value in {"axis": axis, "is_transposed": is_conv1d(module), **settings}.items():
        setattr(module, name, value)


def is_linear(module: nn.Module) -> bool:
    """Returns True if a module computes what torch's linear layer or transformers' Conv1D does."""
    is_torch = type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear"
    return is_torch or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Returns True for transformers' Conv1D, a linear layer whose weight is transposed. Its name
    and attributes tell it, so that transformers need not be installed."""
    has_name = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return has_name and hasattr(module, "nf")

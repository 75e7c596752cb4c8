"""Classes that `convert.apply` puts on top of a module's own class, as `fully_shard` does. Their
forward works on this rank's part of the parameters.

Shapes: B batch, S sequence, I input features, O output features, n = tp. The docstring of each
class says what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d.layers.collectives import SEQUENCE_DIM
from parallel3d.layers.gradients import local_tensor
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
from parallel3d.shard_sizes import largest_shard, shard_rows


class ConvertedModule(ShardedModule):
    """Base of the classes. The attributes are those that `layers.linear` asks a layer for."""

    prefix = "TensorParallel"  # of the name of the class that a module gets
    is_transposed = False  # the weight is [I, O], as in transformers' Conv1D
    padded_width = rows = None
    # Called once, in the first forward pass: refuses adapters that were added after the split.
    refuse_additions: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # Conv1D's own leaves out what is split

    def check_once(self) -> None:
        if self.refuse_additions is not None and not is_compiling():
            self.refuse_additions()
            self.refuse_additions = None


class ColumnParallel(ConvertedModule):
    """A linear layer of this rank's output features: [B, S, I] -> [B, S, O / n], or [B, S, O] with
    `gather_output`. Sends nothing forward, except for an all-gather of y with `gather_output`.
    All-reduces dx backward, unless a module around it does."""

    features: int  # output features of all ranks
    gather_output: bool = False

    def forward(self, x: Tensor) -> Tensor:
        self.check_once()
        (y,) = column_parallel(x, (self,))
        if not self.gather_output:
            return y
        width = largest_shard(self.features, self.axis.size)  # the last ranks may have fewer
        padded = F.pad(y, (0, width - y.shape[-1]))
        return gather_from_region(padded, self.axis)[..., : self.features]


class PackedPart(NamedTuple):
    """One of the matrices that are packed in a weight."""

    features: int  # its output features
    shares: int  # its distinct shards: tp, or fewer if neighbouring ranks compute the same one


class PackedColumnParallel(ConvertedModule):
    """A column-parallel layer whose weight has several matrices side by side, or one of heads that
    ranks share: [Note: packed weights] in `convert.apply`. All-to-all of the weight's shard
    forward, and of its gradient backward."""

    packed: Sequence[PackedPart]

    def forward(self, x: Tensor) -> Tensor:
        self.check_once()
        weight, bias = self.replicated("weight"), self.replicated("bias")
        shard = weight if self.is_transposed else weight.t()  # [I / n, O]
        sent = self._by_rank(shard).transpose(0, 1)  # [n, I / n, O / n]
        own = all_to_all_of_region(sent, self.axis).flatten(0, 1)  # [I, O / n]
        if bias is not None:
            bias = self._by_rank(copy_to_region(bias, self.axis))[self.axis.rank]
        return F.linear(self.enter(x), own.t(), bias)

    def _by_rank(self, full: Tensor) -> Tensor:
        """Splits [..., O] into [..., n, O / n], the output features that each rank computes."""
        pieces = []
        sizes = [part.features for part in self.packed]
        for piece, part in zip(full.split(sizes, -1), self.packed, strict=True):
            piece = piece.unflatten(-1, (part.shares, -1))
            copies = self.axis.size // part.shares
            pieces.append(piece.repeat_interleave(copies, -2) if copies > 1 else piece)
        return torch.cat(pieces, -1)


class RowParallel(ConvertedModule):
    """A linear layer of this rank's input features: [B, S, I / n] -> [B, S, O]. All-reduces y
    forward; sends nothing backward. With `sequence_parallel` -> [B, S / n, O]: reduce-scatters y
    forward, all-gathers dy backward. The bias is added after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        self.check_once()
        return row_parallel(x, self)

    def replicated(self, name: str) -> Any:
        part = super().replicated(name)
        is_partial = name == "bias" and self.sequence_parallel and part is not None
        return copy_to_region(part, self.axis) if is_partial else part


# An nn.Embedding, so that it comes between torch's class and one of a model.
class VocabParallel(ConvertedModule, nn.Embedding):
    """A look-up in this rank's rows: ids [B, S] -> [B, S, D]. All-reduces y forward; sends nothing
    backward."""

    @property
    def first_row(self) -> int:
        return shard_rows(self.num_embeddings, self.axis.rank, self.axis.size).start

    @torch.no_grad()
    def _fill_padding_idx_with_zero(self) -> None:
        # torch's own, which `reset_parameters` calls, would fill a copy of the row.
        own = shard_rows(self.num_embeddings, self.axis.rank, self.axis.size)
        if self.padding_idx is not None and self.padding_idx in own:
            local_tensor(self.weight)[self.padding_idx - own.start].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        self.check_once()
        y = vocab_parallel_lookup(ids, self)
        if self.padding_idx is None:
            return y
        is_padding = (ids == self.padding_idx).unsqueeze(-1)
        return torch.where(is_padding, y.detach(), y)  # its row does not learn


class Replicated(ConvertedModule):
    """A module that every rank has whole. During its forward, its parameters and those of its
    replicated children (nn.MultiheadAttention reads its output layer's) are plain tensors; at any
    other time they are DTensors.

    With `partial_gradient` the gradients of the parameters are all-reduced. With `gather_sequence`
    the output [B, S / n, D] is all-gathered."""

    partial_gradient: bool = False
    gather_sequence: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        owners = [self, *(child for child in self.children() if isinstance(child, Replicated))]
        dtensors = [dict(owner._parameters) for owner in owners]
        try:
            for owner in owners:
                owner._use_plain_parameters()
            y = super().forward(*args, **kwargs)
        finally:
            for owner, parameters in zip(owners, dtensors, strict=True):
                owner._parameters.update(parameters)
        return gather_from_region(y, self.axis, SEQUENCE_DIM) if self.gather_sequence else y

    def _use_plain_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                part = self.replicated(name)
                part = copy_to_region(part, self.axis) if self.partial_gradient else part
                self._parameters[name] = part


class ParallelExperts(Replicated):
    """Experts of a mixture of experts, of which this rank has some: tokens [T, D], the experts of
    each [T, k], counted over all ranks, and their weights [T, k] -> [T, D]. All-reduces y forward,
    and dx and the gradient of the weights backward. Choices of another rank's experts get the
    number that transformers' forward leaves out, and weight 0.

    Llama 4's experts take the tokens of one expert after the other, [experts * T, D], and return
    as many: all-gathers y forward and dx backward."""

    count: int  # experts of all ranks

    def forward(
        self, x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if chosen is None or weights is None:
            y: Tensor = super().forward(scatter_to_region(x, self.axis, 0))
            return gather_from_region(y, self.axis, 0)
        own = shard_rows(self.count, self.axis.rank, self.axis.size)
        elsewhere = (chosen < own.start) | (chosen >= own.stop)
        chosen = (chosen - own.start).masked_fill(elsewhere, len(own))
        weights = copy_to_region(weights, self.axis).masked_fill(elsewhere, 0.0)
        y = super().forward(copy_to_region(x, self.axis), chosen, weights)
        return reduce_from_region(y, self.axis)


class EnterRegion(ConvertedModule):
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


class PretrainedModel(ConvertedModule):
    """A model of transformers. All ranks call `save_pretrained`: they gather one tensor after the
    other, and rank 0 writes them. Whoever passes a `state_dict` writes it."""

    prefix = ""  # config.json names the class

    def save_pretrained(
        self, folder: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **more: Any
    ) -> None:
        if state_dict is None:
            state_dict, writes = {}, dist.get_rank() == 0
            full: dict[int, Tensor] = {}  # tied tensors are one tensor in the file, too
            for name, tensor in self.state_dict(keep_vars=True).items():
                if id(tensor) not in full:
                    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    full[id(tensor)] = gathered.detach().cpu() if writes else torch.empty(0)
                state_dict[name] = full[id(tensor)]
            if not writes:
                return
        super().save_pretrained(folder, *args, state_dict=state_dict, **more)  # type: ignore[misc]


def add_class(module: nn.Module, kind: type[ConvertedModule], axis: Axis, **settings: Any) -> None:
    """Puts a class on top of the module's own. The object, its parameters and its hooks stay.

    A vocabulary-parallel look-up goes below a class of embeddings that changes the result of
    torch's look-up, as Gemma's does."""
    own = type(module)
    is_below = kind is VocabParallel and own.forward is not nn.Embedding.forward
    bases = (own, kind) if is_below else (kind, own)
    module.__class__ = type(f"{kind.prefix}{own.__name__}", bases, {})
    for name, value in {"axis": axis, "is_transposed": is_conv1d(module), **settings}.items():
        setattr(module, name, value)


def is_linear(module: nn.Module) -> bool:
    """Returns True if a module computes what torch's linear layer or transformers' Conv1D does."""
    is_torch = type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear"
    return is_torch or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Returns True for transformers' Conv1D, a linear layer whose weight is transposed. Its name
    and attributes tell it, so that transformers need not be installed."""
    weight = module._parameters.get("weight")
    has_name = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return has_name and hasattr(module, "nf") and weight is not None and weight.ndim == 2

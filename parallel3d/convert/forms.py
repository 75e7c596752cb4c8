"""The classes that `convert.apply` puts on top of a module's own, whose forward works on this rank's part.

Shapes: B batch, S sequence, I input features, O output features, P packed matrices, n = tp. The docstring of
each class says what it sends. A weight is [O, I], or [I, O] in transformers' Conv1D.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from parallel3d.layers.collectives import SEQUENCE_DIM
from parallel3d.layers.embedding import look_up
from parallel3d.layers.regions import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from parallel3d.mesh import Axis
from parallel3d.row_split import largest_shard, shard_rows


class Form(nn.Module):
    """Base of the forms: parameters are DTensors at rest, and a state dict of whole tensors loads too."""

    axis: Axis

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter of this module, for autograd; None where it has none."""
        parameter = self._parameters.get(name)
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        weight = self.local("weight")
        assert weight is not None
        return weight, self.local("bias")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:  # torch's own message tells of other shapes
                value = value.to(parameter.device)
                cut = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                state_dict[prefix + name] = cut
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ColumnForm(Form):
    """A linear layer of this rank's output features: [B, S, I] -> [B, S, O / n], or [B, S, O] where it gathers them.

    Sends nothing forward (all-gathers y where it gathers) and all-reduces dx backward, unless its parent's EnterForm
    does. With `packed` > 1 and `shared_heads`: [Note: packed weights] and [Note: shared heads] of `convert.apply`.
    """

    features: int  # output features of all ranks
    packed: int = 1
    shared_heads: int | None = None  # where tp is a multiple of so many heads
    gather_output: bool = False
    entered: bool = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._own_columns()
        y = F.linear(x if self.entered else copy_to_region(x, self.axis), weight, bias)
        if not self.gather_output:
            return y
        each = largest_shard(self.features, self.axis.size)  # the last ranks may have fewer
        return gather_from_region(F.pad(y, (0, each - y.shape[-1])), self.axis)[..., : self.features]

    def _own_columns(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.weight_and_bias()
        if self.packed > 1:
            if bias is not None:
                bias = copy_to_region(bias, self.axis).view(self.packed, -1).chunk(self.axis.size, 1)[self.axis.rank]
                bias = bias.flatten()
            weight = cast(Tensor, _ColumnsFromRows.apply(weight, self.axis, self.packed))
        elif self.shared_heads is not None:
            head = self.axis.rank * self.shared_heads // self.axis.size
            weight = copy_to_region(weight, self.axis).chunk(self.shared_heads, 1 if is_conv1d(self) else 0)[head]
            bias = None if bias is None else copy_to_region(bias, self.axis).chunk(self.shared_heads)[head]
        return weight.t() if is_conv1d(self) else weight, bias


class RowForm(Form):
    """A linear layer of this rank's input features: [B, S, I / n] -> [B, S, O]. All-reduces y forward; sends nothing
    backward. With `sequence` -> [B, S / n, O]: reduce-scatters y forward, all-gathers dy backward. The bias is added
    after the sum."""

    sequence: bool = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight_and_bias()
        y = F.linear(x, weight.t() if is_conv1d(self) else weight)
        if not self.sequence:
            y = reduce_from_region(y, self.axis)
            return y if bias is None else y + bias
        y = reduce_scatter_from_region(y, self.axis)
        return y if bias is None else y + copy_to_region(bias, self.axis)  # each rank's is of its tokens


class EmbeddingForm(Form):
    """A look-up in this rank's rows: ids [B, S] -> [B, S, D]. All-reduces y forward; sends nothing backward."""

    num_embeddings: int
    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        rows, _ = self.weight_and_bias()
        first_row = shard_rows(self.num_embeddings, self.axis.rank, self.axis.size).start
        if self.padding_idx is not None:  # its row is looked up, but learns nothing
            rows = _hold_row(rows, self.padding_idx - first_row)
        if rows.shape[0] == 0:  # fewer ids than tp
            y = rows.new_zeros(*ids.shape, rows.shape[1]) + 0.0 * rows.sum()
        else:
            y, _, _ = look_up(ids, rows, first_row)
        return reduce_from_region(y, self.axis)


class ReplicatedForm(Form):
    """A module that every rank has whole. While its own forward runs, its parameters read as plain tensors; to everyone
    else they are DTensors. Where its gradient is partial it is all-reduced in the backward. With
    `gather_sequence` its output [B, S / n, D] is all-gathered."""

    partial_gradient: bool = False
    gather_sequence: bool = False
    _computing: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_plain_tensors():
            y = super().forward(*args, **kwargs)
        return gather_from_region(y, self.axis, SEQUENCE_DIM) if self.gather_sequence else y

    @contextmanager
    def _as_plain_tensors(self) -> Iterator[None]:
        before, self._computing = self._computing, True  # before: recompute may run a forward within a forward
        try:
            yield
        finally:
            self._computing = before

    def _read(self, name: str) -> Tensor | None:
        if not self._computing:
            return self._parameters[name]
        local = self.local(name)
        return copy_to_region(local, self.axis) if self.partial_gradient and local is not None else local


class EnterForm(Form):
    """A module whose input several column-parallel layers read. Sends nothing forward; all-reduces dx backward. With
    `sequence` its input is [B, S / n, D]: all-gathered forward, dx reduce-scattered backward."""

    argument: str
    sequence: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self._taken(args[0]), *args[1:])
        else:
            kwargs[self.argument] = self._taken(kwargs[self.argument])
        return super().forward(*args, **kwargs)

    def _taken(self, x: Tensor) -> Tensor:
        return all_gather_to_region(x, self.axis) if self.sequence else copy_to_region(x, self.axis)


class ScatterForm(EnterForm):
    """A module whose input [B, S, D] is whole and that works on [B, S / n, D]. Sends nothing forward; all-gathers dx
    backward."""

    def _taken(self, x: Tensor) -> Tensor:
        return scatter_to_region(x, self.axis, SEQUENCE_DIM)


def reform(module: nn.Module, form: type[Form], axis: Axis, **settings: object) -> None:
    """Puts a form on top of the module's class. The object, its parameters and its hooks stay what they are."""
    own = type(module)
    members: dict[str, object] = {}
    if form is ReplicatedForm:
        members = {name: _property(name) for name in module._parameters}
    module.__class__ = type(f"TensorParallel{own.__name__}", (form, own), members)
    for name, value in {"axis": axis, **settings}.items():
        setattr(module, name, value)


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is transformers' Conv1D, a linear layer whose weight is transposed. It is recognised by
    its name and attributes, so that transformers need not be installed."""
    weight = module._parameters.get("weight")
    is_named_so = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return is_named_so and hasattr(module, "nf") and weight is not None and weight.ndim == 2


class _ColumnsFromRows(Function):
    """[I / n, P * O], this rank's rows -> [I, P * O / n], its columns of each of the P matrices; backward: the way
    back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, packed: int) -> Tensor:
        ctx.axis, ctx.packed = axis, packed
        blocks = rows.unflatten(1, (packed, axis.size, -1)).movedim(2, 0).contiguous()  # [n, I / n, P, O / n]
        return _all_to_all(blocks, axis).flatten(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        n = ctx.axis.size
        blocks = grad.unflatten(1, (ctx.packed, -1)).unflatten(0, (n, -1)).contiguous()  # [n, I / n, P, O / n]
        return _all_to_all(blocks, ctx.axis).movedim(0, 2).flatten(1, 3), None, None


def _all_to_all(blocks: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=axis.group)
    return received


def _hold_row(rows: Tensor, row: int) -> Tensor:
    """The same rows, but no gradient for one of them, if it is among them."""
    if not 0 <= row < rows.shape[0]:
        return rows
    held = torch.zeros(rows.shape[0], 1, dtype=torch.bool, device=rows.device)
    held[row] = True
    return torch.where(held, rows.detach(), rows)


def _property(name: str) -> property:
    return property(lambda self: self._read(name))

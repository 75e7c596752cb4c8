"""The classes that `convert.apply` puts on top of a module's own, whose forward works on this rank's part.

Shapes: B batch, S sequence, I input features, O output features, P packed matrices, n = tp. The docstring of
each class says what it sends. A weight is [O, I], or [I, O] in transformers' Conv1D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional as F

from parallel3d.layers.collectives import (
    SEQUENCE_DIM,
    Wait,
    all_reduce,
    all_to_all,
    gather,
    start_all_reduce,
    start_all_to_all,
    sum_partial,
)
from parallel3d.layers.gradients import (
    accumulate_or_return,
    accumulate_or_return_product,
    local_tensor,
    refuse_function_transforms,
)
from parallel3d.layers.linear import cast_input
from parallel3d.layers.parameter import added_in_place
from parallel3d.layers.regions import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from parallel3d.layers.split_module import SplitModule, draw_dtensors_whole
from parallel3d.layers.vocabulary import look_up
from parallel3d.mesh import Axis
from parallel3d.row_split import largest_shard, shard_rows


class PackedPart(NamedTuple):
    """One of the products of a packed weight."""

    features: int  # its output features
    shares: int  # in how many equal shares ranks compute it: tp, or fewer where neighbours compute the same one


class Pack(NamedTuple):
    """What `PackedProduct` is told of a packed weight."""

    axis: Axis
    parts: Sequence[PackedPart]
    is_transposed: bool  # whether the weight is [I, O]
    is_entered: bool  # whether the parent sums dx


class Form(SplitModule):
    """Base of the forms, whose parameters are DTensors at rest."""

    axis: Axis
    is_transposed: bool  # whether the weight is [I, O]
    prefix = "TensorParallel"  # the class that has the form is named so
    refuse_additions: Callable[[], None] | None = None  # is called once, in the first forward pass

    def refuse_misuse(self) -> None:
        """Raises RuntimeError for what a forward pass of this layer would compute wrong."""
        refuse_function_transforms()
        if self.refuse_additions is not None and not is_compiling():
            self.refuse_additions()
            self.refuse_additions = None

    def local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter of this module, for autograd; None where it has none."""
        self.refuse_misuse()
        parameter = self._parameters.get(name)
        if parameter is None:
            return None
        return added_in_place(parameter) if self.adds_to(parameter) else local_tensor(parameter)

    def adds_to(self, parameter: Tensor) -> bool:
        """Returns whether the backward of this forward adds a parameter's gradient in place."""
        can_add = parameter.is_leaf and parameter.requires_grad and torch.is_grad_enabled()
        return self.fused_gradients and can_add and not is_compiling()

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # Conv1D's own leaves out what is split

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Returns this rank's part of the weight, [O, I] in Conv1D too, and of the bias."""
        weight = self.local("weight")
        assert weight is not None
        return weight.t() if self.is_transposed else weight, self.local("bias")

    def adds_product(self, x: Tensor) -> bool:
        """Returns whether `AddingProduct` computes this layer."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return self.adds_to(parameter) and not torch.is_autocast_enabled(x.device.type)

    def adding_product(self, x: Tensor) -> Tensor:
        """Returns the output of this layer, with what it sends, by one function of autograd."""
        self.refuse_misuse()
        y: Tensor = AddingProduct.apply(x, self._parameters["weight"], self._parameters.get("bias"), self)
        return y


class AddingProduct(Function):
    """A linear layer of this rank's parts, column-parallel or row-parallel, whose backward adds the weight's gradient
    in place by the product itself: [Note: fused gradients] in `layers.gradients`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: ColumnForm | RowForm) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.form = weight, bias, form
        local, own_bias = local_tensor(weight), None if bias is None else local_tensor(bias)
        local = local.t() if form.is_transposed else local
        if isinstance(form, ColumnForm):
            return F.linear(x, local, own_bias)
        y = sum_partial(F.linear(x, local), form.axis, scattered=form.sequence)
        return y if own_bias is None else y + own_bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), form, local = ctx.saved_tensors, ctx.form, local_tensor(ctx.weight)
        is_scattered = isinstance(form, RowForm) and form.sequence
        if ctx.bias is not None and ctx.bias.requires_grad:
            summed = grad.reshape(-1, grad.shape[-1]).sum(0)  # is_scattered: of this rank's tokens
            accumulate_or_return(ctx.bias, all_reduce(summed, form.axis) if is_scattered else summed, fused=True)
        grad = gather(grad, form.axis) if is_scattered else grad
        grad_x = grad @ (local.t() if form.is_transposed else local) if ctx.needs_input_grad[0] else None
        travelling: Wait | None = None
        if grad_x is not None and isinstance(form, ColumnForm) and not form.entered:
            travelling = start_all_reduce(grad_x, form.axis)  # while the weight's gradient is computed
        factors = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        accumulate_or_return_product(ctx.weight, *(reversed(factors) if form.is_transposed else factors), fused=True)
        return grad_x if travelling is None else travelling(), None, None, None


class ColumnForm(Form):
    """A linear layer of this rank's output features: [B, S, I] -> [B, S, O / n], or [B, S, O] where it gathers them.

    Sends nothing forward (all-gathers y where it gathers) and all-reduces dx backward, unless its parent's EnterForm
    does. With `packed` and `shared_heads`: [Note: packed weights] and [Note: shared heads] of `convert.apply`."""

    features: int  # output features of all ranks
    packed: Sequence[PackedPart] = ()  # where the weight has several products
    shared_heads: int | None = None  # where tp is a multiple of so many heads
    gather_output: bool = False
    entered: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            y = self._packed_product(x)
        elif self.shared_heads is None and self.adds_product(x):
            y = self.adding_product(x)
        else:
            y = F.linear(x if self.entered else copy_to_region(x, self.axis), *self._own_head())
        if not self.gather_output:
            return y
        each = largest_shard(self.features, self.axis.size)  # the last ranks may have fewer
        return gather_from_region(F.pad(y, (0, each - y.shape[-1])), self.axis)[..., : self.features]

    def _packed_product(self, x: Tensor) -> Tensor:
        self.refuse_misuse()
        both = [self._parameters.get(name) for name in ("weight", "bias")]
        given = [each if each is None or self.adds_to(each) else local_tensor(each) for each in both]
        pack = Pack(self.axis, self.packed, self.is_transposed, self.entered)
        y: Tensor = PackedProduct.apply(cast_input(x), *given, pack)
        return y

    def _own_head(self) -> tuple[Tensor, Tensor | None]:
        """Returns this rank's part of the weight and the bias, or that of the head that it shares."""
        weight, bias = self.weight_and_bias()
        if self.shared_heads is None:
            return weight, bias
        head = self.axis.rank * self.shared_heads // self.axis.size
        weight = copy_to_region(weight, self.axis).chunk(self.shared_heads)[head]
        return weight, None if bias is None else copy_to_region(bias, self.axis).chunk(self.shared_heads)[head]


class PackedProduct(Function):
    """[Note: packed weights] of `convert.apply`: x [..., I], the weight's shard [I / n, O], which is [O, I / n] in
    nn.Linear, and the bias [O] -> this rank's [..., O / n].

    All-to-all of the weight's shard forward. Backward another of the gradients, the bias's as one row more for each
    rank; and dx is all-reduced, unless the parent's EnterForm does. A parameter that is given as a DTensor has its
    gradient added in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pack: Pack) -> Tensor:
        local = local_tensor(weight) if pack.is_transposed else local_tensor(weight).t()
        sent = _by_rank(local, pack).transpose(0, 1)  # [n, I / n, O / n]
        own = all_to_all(sent, pack.axis).flatten(0, 1).t()  # [O / n, I]
        ctx.save_for_backward(x, own)
        ctx.weight, ctx.bias, ctx.pack = weight, bias, pack
        return F.linear(x, own, None if bias is None else _by_rank(local_tensor(bias), pack)[pack.axis.rank])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, own), pack, axis = ctx.saved_tensors, ctx.pack, ctx.pack.axis
        flat, grad_x = grad.reshape(-1, grad.shape[-1]), None
        arriving_x: Wait | None = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ own.to(grad.dtype)
            arriving_x = None if pack.is_entered else start_all_reduce(grad_x, axis)
        if not any(ctx.needs_input_grad[1:]):
            return grad_x if arriving_x is None else arriving_x(), None, None, None
        shards = (x.reshape(-1, x.shape[-1]).t() @ flat).chunk(axis.size)  # each [I / n, O / n]
        rows = len(shards[0])
        if ctx.bias is not None:
            of_bias = flat.sum(0, keepdim=True)
            shards = tuple(each for shard in shards for each in (shard, of_bias))
        arriving = start_all_to_all(torch.cat(shards).unflatten(0, (axis.size, -1)), axis)
        grad_x = grad_x if arriving_x is None else arriving_x()  # the first under way has to end first
        joined = _joined(arriving().transpose(0, 1), pack)  # [I / n, O], and the bias's row
        of_weight = joined[:rows] if pack.is_transposed else joined[:rows].t().contiguous()
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            grad_x,
            _given(ctx.weight, of_weight) if needs_weight else None,
            _given(ctx.bias, joined[rows].clone()) if needs_bias else None,  # a view would keep all of `joined`
            None,
        )


def _given(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    return accumulate_or_return(parameter, gradient, fused=isinstance(parameter, DTensor))


def _by_rank(whole: Tensor, pack: Pack) -> Tensor:
    """Takes [..., O] apart into [..., n, O / n], the output features that each rank computes."""
    pieces = []
    for piece, (_, shares) in zip(whole.split([part.features for part in pack.parts], -1), pack.parts, strict=True):
        piece = piece.unflatten(-1, (shares, -1))
        pieces.append(piece if shares == pack.axis.size else piece.repeat_interleave(pack.axis.size // shares, -2))
    return torch.cat(pieces, -1)


def _joined(by_rank: Tensor, pack: Pack) -> Tensor:
    """Joins [..., n, O / n] to [..., O], the conjugate of `_by_rank`: what several ranks have computed is summed."""
    pieces = []
    widths = [features // shares for features, shares in pack.parts]
    for piece, (_, shares) in zip(by_rank.split(widths, -1), pack.parts, strict=True):
        piece = piece if shares == pack.axis.size else piece.unflatten(-2, (shares, -1)).sum(-2)
        pieces.append(piece.flatten(-2))
    return torch.cat(pieces, -1)


class RowForm(Form):
    """A linear layer of this rank's input features: [B, S, I / n] -> [B, S, O]. All-reduces y forward; sends nothing
    backward. With `sequence` -> [B, S / n, O]: reduce-scatters y forward, all-gathers dy backward. The bias is added
    after the sum."""

    sequence: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.adds_product(x):
            return self.adding_product(x)
        weight, bias = self.weight_and_bias()
        y = F.linear(x, weight)
        if not self.sequence:
            y = reduce_from_region(y, self.axis)
            return y if bias is None else y + bias
        y = reduce_scatter_from_region(y, self.axis)
        return y if bias is None else y + copy_to_region(bias, self.axis)  # each rank's is of its tokens


class EmbeddingForm(Form, nn.Embedding):  # so that it comes between torch's class and one of a model
    """A look-up in this rank's rows: ids [B, S] -> [B, S, D]. All-reduces y forward; sends nothing backward."""

    def _fill_padding_idx_with_zero(self) -> None:  # `reset_parameters` calls it; a row of a DTensor is a copy
        own = shard_rows(self.num_embeddings, self.axis.rank, self.axis.size)
        if self.padding_idx is not None and self.padding_idx in own:
            with torch.no_grad():
                self.weight_and_bias()[0][self.padding_idx - own.start].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        rows, _ = self.weight_and_bias()
        first_row = shard_rows(self.num_embeddings, self.axis.rank, self.axis.size).start
        if rows.shape[0] == 0:  # fewer ids than tp: this rank gets a row that no id looks up
            rows = F.pad(rows, (0, 0, 0, 1))
        y, _, _ = look_up(ids, rows, first_row)
        if self.padding_idx is not None:  # its row is looked up, but learns nothing
            y = torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return reduce_from_region(y, self.axis)


class SplitEmbeddingForm(Form):
    """A look-up of this rank's columns: ids [B, S] -> [B, S, D / n]. Sends nothing."""

    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        weight, _ = self.weight_and_bias()
        return F.embedding(ids, weight, self.padding_idx)


class ReplicatedForm(Form):
    """A module that every rank has whole. While its own forward runs, its parameters read as plain tensors; to everyone
    else they are DTensors. Where its gradient is partial it is all-reduced in the backward. With
    `gather_sequence` its output [B, S / n, D] is all-gathered."""

    partial_gradient: bool = False
    gather_sequence: bool = False
    _computing: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A child's parameters may be read here, too, as those of nn.MultiheadAttention's own output product are.
        forms = [self, *(child for child in self._modules.values() if isinstance(child, ReplicatedForm))]
        before = [each._computing for each in forms]  # recompute may run a forward within a forward
        set_flag = object.__setattr__  # nn.Module's own asks first whether it is a parameter, which takes longer
        try:
            for each in forms:
                set_flag(each, "_computing", True)
            y = super().forward(*args, **kwargs)
        finally:
            for each, was in zip(forms, before, strict=True):
                set_flag(each, "_computing", was)
        return gather_from_region(y, self.axis, SEQUENCE_DIM) if self.gather_sequence else y

    def read(self, name: str) -> Tensor | None:
        """Returns a parameter, as a plain tensor for the module's own forward."""
        if not self._computing:
            if name not in self._parameters:
                raise RuntimeError(
                    f"{type(self).__name__}: its {name} was taken away, as DistributedDataParallel with a device_mesh "
                    'does; use parallel3d.sharding.apply.shard(model, mesh, "NO_SHARD"), or fully_shard'
                )
            return self._parameters[name]
        local = self.local(name)
        return copy_to_region(local, self.axis) if self.partial_gradient and local is not None else local


class ExpertsForm(ReplicatedForm):
    """Experts of a mixture, of which this rank has some: tokens [T, D], the experts of each [T, k], counted over all
    ranks, and their weights [T, k] -> [T, D]. All-reduces y forward, and dx and the weights' gradient backward. What
    goes to another rank's expert is given the number that transformers' forward leaves out, and no weight.

    Llama 4's are given the tokens of one expert after the other, [experts * T, D], and give as many: all-gathers y
    forward and dx backward."""

    count: int  # experts of all ranks

    def forward(self, x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        if chosen is None or weights is None:
            y: Tensor = super().forward(scatter_to_region(x, self.axis, 0))
            return gather_from_region(y, self.axis, 0)
        own = shard_rows(self.count, self.axis.rank, self.axis.size)
        elsewhere = (chosen < own.start) | (chosen >= own.stop)
        chosen = (chosen - own.start).masked_fill(elsewhere, len(own))
        weights = copy_to_region(weights, self.axis).masked_fill(elsewhere, 0.0)
        return reduce_from_region(super().forward(copy_to_region(x, self.axis), chosen, weights), self.axis)


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
    """A module that works on [B, S / n, D] of its input [B, S, D]. Sends nothing forward; all-gathers dx backward."""

    def _taken(self, x: Tensor) -> Tensor:
        return scatter_to_region(x, self.axis, SEQUENCE_DIM)


class SavingForm(Form):
    """A model of transformers. Its `save_pretrained` is called by all ranks: they gather one tensor after the other,
    and rank 0 writes them, for which the others do not wait. A given `state_dict` is written by whoever calls it."""

    prefix = ""  # config.json names the class

    def save_pretrained(
        self, folder: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **more: Any
    ) -> None:
        if state_dict is None:
            whole: dict[int, Tensor | None] = {}
            named, writes = self.state_dict(keep_vars=True), dist.get_rank() == 0
            for tensor in named.values():  # a tied one comes twice, and is one tensor in the file, too
                if id(tensor) not in whole:
                    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    whole[id(tensor)] = full.detach().cpu() if writes else None
            if not writes:
                return
            state_dict = {name: full for name, tensor in named.items() if (full := whole[id(tensor)]) is not None}
        super().save_pretrained(folder, *args, state_dict=state_dict, **more)  # type: ignore[misc]


def reform(module: nn.Module, form: type[Form], axis: Axis, **settings: object) -> None:
    """Puts a form on top of the module's class. The object, its parameters and its hooks stay what they are. A form's
    look-up goes below a class of embeddings that does something with what torch's own looks up, as Gemma's does."""
    own, read = type(module), module._parameters if issubclass(form, ReplicatedForm) else ()
    members = {name: property(partial(ReplicatedForm.read, name=name)) for name in read}
    is_below = form is EmbeddingForm and own.forward is not nn.Embedding.forward
    bases = (own, form) if is_below else (form, own)
    module.__class__ = type(f"{form.prefix}{own.__name__}", bases, {"is_transposed": is_conv1d(module), **members})
    for name, value in {"axis": axis, **settings}.items():
        setattr(module, name, value)


def on_axis(parameter: nn.Parameter, dim: int | None, tp: DeviceMesh, axis: Axis) -> nn.Parameter:
    """Returns this rank's part of a parameter as a DTensor that is split in `dim`, or whole on every rank."""
    draw_dtensors_whole()
    full = local = parameter.detach()
    placement: Placement = Replicate() if dim is None else Shard(dim)
    if dim is not None:
        rows = shard_rows(full.shape[dim], axis.rank, axis.size)
        local = full.narrow(dim, rows.start, len(rows)).clone()
    laid = DTensor.from_local(local, tp, [placement], run_check=False, shape=full.shape, stride=full.stride())
    return nn.Parameter(laid, requires_grad=parameter.requires_grad)


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module computes as torch's own linear layer does: one of that class, or of a class that is
    known to."""
    return type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear"


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is transformers' Conv1D, a linear layer whose weight is transposed. It is recognised by
    its name and attributes, so that transformers need not be installed."""
    weight = module._parameters.get("weight")
    is_named_so = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return is_named_so and hasattr(module, "nf") and weight is not None and weight.ndim == 2

"""Both ends of a vocabulary that is split over tp: the token embedding, the head that makes the
logits, and head and loss in one, which never holds the logits of more than a chunk of tokens.

Shapes: B batch, S sequence, D hidden, V vocabulary, T = B S tokens, n = tp, w = ceil(V / n), w' = w
rounded up to `pad_to_multiple_of`.

[Note: uneven vocabulary] Rank r has rows r c <= id < min((r + 1) c, V) of V, where c = ceil(V / n):
DTensor's own uneven shards. So nothing is padded at rest: the parameter's global shape, the state
dict and a checkpoint are those of one device. Where equal widths are needed, the head pads its
logits instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.layers.collectives import gather, sum_partial
from parallel3d.layers.gradients import (
    accumulate_or_return,
    accumulated_gradient,
    add_product,
    local_tensor,
)
from parallel3d.layers.linear import (
    ColumnParallelLinear,
    cast_input,
    column_parallel,
    padded_product,
)
from parallel3d.layers.loss import IGNORED, TokenLoss, wide_dtype
from parallel3d.layers.parameter import Initializer, LayerTp, ParallelModule, ParameterSpec, normal
from parallel3d.layers.regions import gather_from_region
from parallel3d.shard_sizes import largest_shard, shard_rows

Forward = TypeVar("Forward", bound=Callable[..., Any])


class VocabParallelEmbedding(ParallelModule, nn.Embedding):
    """ids [batch, seq] -> [batch, seq, hidden], or [batch, seq / tp, hidden] with
    `sequence_parallel`.

    Each tp rank looks up the ids of its rows, and the sum over tp joins them: an all-reduce (or
    reduce-scatter) forward; backward nothing (or an all-gather). Megatron-LM, arXiv 1909.08053,
    section 3.

    tp need not divide vocab: [Note: uneven vocabulary]. An id outside the vocabulary gives zeros
    under tp > 1: check ids before they come here, as `data.loader` does. Raises ValueError where a
    rank would have no row at all.
    """

    weight: nn.Parameter
    padding_idx = max_norm = None
    norm_type, scale_grad_by_freq, sparse = 2.0, False, False

    def __init__(
        self, vocab: int, hidden: int, *, tp: LayerTp = None, init: Initializer = normal(0.02)
    ) -> None:
        super().__init__(tp)
        self.num_embeddings, self.embedding_dim = vocab, hidden
        self.first_row = shard_rows(vocab, self.axis.rank, self.axis.size).start
        self.add_parameter("weight", ParameterSpec((vocab, hidden), 0, init, uneven=True))

    def forward(self, ids: Tensor) -> Tensor:
        return vocab_parallel_lookup(ids, self)


def vocab_parallel_lookup(ids: Tensor, layer: Any) -> Tensor:
    """Returns the rows of a vocabulary-parallel table, joined over tp."""
    if not is_compiling():
        looked_up: Tensor = _VocabParallelEmbedding.apply(ids, layer.weight, layer)
        return looked_up
    rows = layer.replicated("weight")
    if layer.axis.size == 1:
        return F.embedding(ids, rows)
    y: Tensor = layer.leave(look_up(ids, rows, layer.first_row)[0])
    return y


def look_up(ids: Tensor, rows: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Looks ids [B, S] up in this rank's rows [w, D] of the vocabulary, from id `first` on. Returns
    [B, S, D], with zeros for the ids of other ranks; the ids as indices of the rows, 0 for other
    ranks'; and which ids are other ranks'."""
    own = ids - first
    elsewhere = (own < 0) | (own >= rows.shape[0])
    own = own.masked_fill(elsewhere, 0)
    return F.embedding(own, rows).masked_fill_(elsewhere.unsqueeze(-1), 0.0), own, elsewhere


class _VocabParallelEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        ctx.weight, ctx.layer, ctx.elsewhere = weight, layer, None
        rows = local_tensor(weight)
        if layer.axis.size == 1:
            ctx.save_for_backward(ids)
            return F.embedding(ids, rows)
        y, own, ctx.elsewhere = look_up(ids, rows, layer.first_row)
        ctx.save_for_backward(own)
        return sum_partial(y, layer.axis, scattered=layer.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), weight, fused = ctx.saved_tensors, ctx.weight, ctx.layer.fused_gradients
        if ctx.layer.sequence_parallel:
            grad = gather(grad, ctx.layer.axis)
        if ctx.elsewhere is not None:
            grad = grad.masked_fill(ctx.elsewhere.unsqueeze(-1), 0.0)
        total = accumulated_gradient(weight) if fused else None
        if total is not None:
            # Added to the rows that were looked up alone: a dense gradient of the vocabulary's size
            # for every microbatch costs more than the look-up.
            add_rows(total, ids, grad)
            return None, None, None
        dense = torch.zeros_like(local_tensor(weight))
        add_rows(dense, ids, grad)
        return None, accumulate_or_return(weight, dense, fused=fused), None


def add_rows(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds each of grad [B, S, D] to the row of `total` [w, D] that ids [B, S] names. The gradients
    of the tokens of one row are summed in float32 at least and then rounded once: added one by one
    to a bf16 row, all but the first few hundred of a frequent token would be lost."""
    ids, grad, wide = ids.flatten(), grad.flatten(0, -2), wide_dtype(total)
    if total.dtype != wide:
        # One token of each row, whichever is written last, stands for all of them and gets their
        # sum; the others get 0.
        tokens = torch.arange(len(ids), device=ids.device)
        standing_for = tokens.new_empty(len(total)).index_put_((ids,), tokens)[ids]
        sums = torch.zeros_like(grad, dtype=wide)
        grad = sums.index_put_((standing_for,), grad.to(wide), accumulate=True)
    total.index_put_((ids,), grad.to(total.dtype), accumulate=True)


class VocabParallelHead(ColumnParallelLinear):
    """x [B, S, D] (or [B, S / n, D] with `sequence_parallel`) -> logits [B, S, w'], or [B, S, V]
    with `gather_output`.

    A column-parallel linear whose output features tp need not divide ([Note: uneven vocabulary]):
    where a rank has fewer than w', its logits are filled up with -inf, which no softmax sees. Its
    weight may be the embedding's (`head.weight = embed.weight`).

    `pad_to_multiple_of`: a GPU multiplies faster into rows of logits that are aligned, of 64
    numbers, say. The weight stays [V, D]: there is no padded row to train, save or export. The loss
    then has to be told `vocab`.

    With `is_deferred` forward returns x unchanged and sends nothing. The caller then computes the
    loss from x by `head_cross_entropy`, or the logits by `logits`.
    """

    uneven = True
    padded_width: int
    is_deferred = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        pad_to_multiple_of: int = 1,
        tp: LayerTp = None,
        init: Initializer = normal(0.02),
        gather_output: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, tp=tp, init=init, gather_output=gather_output)
        self.rows_each = largest_shard(out_features, self.axis.size)
        self.pad_to(pad_to_multiple_of)

    def pad_to(self, multiple: int) -> None:
        """Sets `pad_to_multiple_of`, at any time."""
        if multiple < 1:
            raise ValueError(
                f"VocabParallelHead: pad_to_multiple_of = {multiple}: must be at least 1; try 64"
            )
        self.padded_width = -(-self.rows_each // multiple) * multiple

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_deferred else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        (logits,) = column_parallel(x, (self,))
        missing = self.padded_width - logits.shape[-1]
        if missing:
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        if self.gather_output:
            each = gather_from_region(logits, self.axis).unflatten(
                -1, (self.axis.size, self.padded_width)
            )
            logits = each[..., : self.rows_each].flatten(-2)[..., : self.out_features]
        return logits


def ends_with_head(forward: Forward) -> Forward:
    """Decorates the `forward` of a model that returns the output of its `head` unchanged. The loss
    may then compute the logits in chunks, and write their gradient into their memory."""
    forward.ends_with_head = True  # type: ignore[attr-defined]
    return forward


def head_at_end(model: nn.Module) -> VocabParallelHead | None:
    """Returns the head of a model if the model returns the output of the head unchanged. A subclass
    with a `forward` of its own, of the model or of the head, may do more."""
    head = getattr(model, "head", None)
    is_last = getattr(type(model).forward, "ends_with_head", False)
    is_plain = (
        isinstance(head, VocabParallelHead) and type(head).forward is VocabParallelHead.forward
    )
    return head if is_last and is_plain else None


def head_cross_entropy(
    x: Tensor,
    labels: Tensor,
    head: ColumnParallelLinear,
    *,
    chunk_tokens: int = 512,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """`vocab_parallel_cross_entropy(head(x), labels)`, a chunk of tokens after the other: the
    logits of a chunk are all that exists of them, and the backward computes them again (one more
    product of the head's size: 4 instead of 3).

    x [B, S, D] (or [B, S / n, D] where the head is sequence-parallel), labels [B, S] -> losses [B,
    S], in float32 at least. Peak memory beside x, its gradient and the weight's, which is added up
    in float32: the float32 logits of a chunk, and where the weight is 16 bits wide those, too.
    Sends what the head and the loss send; the input gradient's collective waits for all chunks.
    """
    if head.bias is not None or head.gather_output:
        raise ValueError(
            "head_cross_entropy: needs a head without bias whose output is not gathered"
        )
    x = head.enter(cast_input(x))
    terms = TokenLoss(
        head.axis, head.out_features, ignore_index, label_smoothing, z_loss, chunk_tokens
    )
    compiling = is_compiling()
    weight = head.replicated("weight") if compiling else head.weight
    fused = head.fused_gradients and not compiling
    losses: Tensor = _HeadCrossEntropy.apply(x, weight, labels, terms, fused, head.padded_width)
    return losses


class _HeadCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        terms: TokenLoss,
        fused: bool,
        width: int | None,
    ) -> Tensor:
        ctx.weight, ctx.terms, ctx.fused, ctx.width = weight, terms, fused, width
        rows = local_tensor(weight)
        parts = [
            terms.forward(padded_product(part, rows, width), own_labels, overwrite=True)
            for part, own_labels in terms.chunks(x.flatten(0, -2), labels.flatten())
        ]
        losses, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(x, labels, lse)
        return losses.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, lse = ctx.saved_tensors
        # autocast had x in another type
        rows, weight = local_tensor(ctx.weight).to(x.dtype), ctx.weight
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # The chunks' gradients of the weight are added to its total, or else to a wide tensor.
        total = accumulated_gradient(weight) if ctx.fused and weight.requires_grad else None
        adds_to_total = total is not None and total.dtype == wide_dtype(rows)
        grad_weight = total
        if not adds_to_total and weight.requires_grad:
            grad_weight = torch.zeros_like(rows, dtype=wide_dtype(rows))
        flat = (x.flatten(0, -2), labels.flatten(), lse, grad.flatten(), grad_x.flatten(0, -2))
        for part, own_labels, own_lse, own_grad, out in ctx.terms.chunks(*flat):
            logits = padded_product(part, rows, ctx.width)
            grad_logits = ctx.terms.backward(
                logits, own_labels, own_lse, own_grad, overwrite=True
            ).to(rows.dtype)
            grad_logits = grad_logits[:, : rows.shape[0]]
            torch.mm(grad_logits, rows, out=out)
            if grad_weight is not None:  # it is frozen otherwise
                add_product(grad_weight, grad_logits, part)
            del logits, grad_logits  # before the next chunk's exist
        if adds_to_total or grad_weight is None:
            return grad_x, *[None] * 5
        return (
            grad_x,
            accumulate_or_return(weight, grad_weight.to(weight.dtype), fused=ctx.fused),
            *[None] * 4,
        )

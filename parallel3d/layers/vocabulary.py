"""Both ends of a vocabulary that is split over tp: the token embedding, the head that makes the
logits, and head and loss in one, which never holds the logits of more than a chunk of tokens.

Shapes: B batch, S sequence, D hidden, V vocabulary, T = B S tokens, n = tp, w = ceil(V / n), w' = w
rounded up by `VocabParallelHead.pad_to`.

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
from torch.nn import functional as F

from parallel3d.layers.collectives import gather, outside_graph, sum_partial
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
from parallel3d.layers.loss import TokenLoss, own_indices, wide_dtype
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec
from parallel3d.shard_sizes import largest_shard

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

    Example:
        >>> embed = parallel3d.VocabParallelEmbedding(256, 64)
        >>> embed(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 64])
    """

    padding_idx = max_norm = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(self, vocab: int, hidden: int, *, tp: LayerTp = None) -> None:
        super().__init__(tp)
        self.num_embeddings = vocab
        self.embedding_dim = hidden
        spec = ParameterSpec((vocab, hidden), 0, self.context.init, uneven=True)
        self.add_parameter("weight", spec)

    def forward(self, ids: Tensor) -> Tensor:
        return vocab_parallel_lookup(ids, self)


def vocab_parallel_lookup(ids: Tensor, layer: Any) -> Tensor:
    """Returns the rows of a vocabulary-parallel table, joined over tp."""
    y: Tensor = outside_graph(_VocabParallelEmbedding.apply, ids, layer.weight, layer)
    return y


class _VocabParallelEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        ctx.weight = weight
        ctx.layer = layer
        ctx.elsewhere = None
        rows = local_tensor(weight)
        if layer.axis.size == 1:
            ctx.save_for_backward(ids)
            return F.embedding(ids, rows)
        own, ctx.elsewhere = own_indices(ids, layer.axis.rows(layer.num_embeddings))
        ctx.save_for_backward(own)
        y = F.embedding(own, rows).masked_fill_(ctx.elsewhere.unsqueeze(-1), 0.0)
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
            # Added only to the rows that were looked up: a dense gradient of the vocabulary's size
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
    ids = ids.flatten()
    grad = grad.flatten(0, -2)
    wide = wide_dtype(total)
    if total.dtype != wide:
        # One token of each row, whichever is written last, stands for all of them and gets their
        # sum; the others get 0.
        tokens = torch.arange(len(ids), device=ids.device)
        standing_for = tokens.new_empty(len(total)).index_put_((ids,), tokens)[ids]
        sums = torch.zeros_like(grad, dtype=wide)
        grad = sums.index_put_((standing_for,), grad.to(wide), accumulate=True)
    total.index_put_((ids,), grad.to(total.dtype), accumulate=True)


class VocabParallelHead(ColumnParallelLinear):
    """x [B, S, D] (or [B, S / n, D] with `sequence_parallel`) -> logits [B, S, w'].

    A column-parallel linear whose output features tp need not divide ([Note: uneven vocabulary]):
    where a rank has fewer than w', its logits are filled up with -inf, which no softmax sees. Its
    weight may be the embedding's (`head.weight = embed.weight`).

    A GPU multiplies faster into rows of logits that are aligned: `head.pad_to(64)`. The weight
    stays [V, D]: there is no padded row to train, save or export. The loss then needs `vocab`.

    With `is_deferred` forward returns x unchanged and sends nothing. The caller then computes the
    loss from x by `head_cross_entropy`, or the logits by `logits`.

    Example:
        >>> head = parallel3d.VocabParallelHead(64, 50257)
        >>> head.pad_to(64)
        >>> head(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 50304])
    """

    uneven = True
    padded_width: int
    is_deferred = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: LayerTp = None,
    ) -> None:
        super().__init__(in_features, out_features, tp=tp)
        self.pad_to(1)

    def pad_to(self, multiple: int) -> None:
        """Rounds the width of the logits up to a multiple."""
        rows = largest_shard(self.out_features, self.axis.size)
        self.padded_width = -(-rows // multiple) * multiple

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_deferred else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        (logits,) = column_parallel(x, (self,))
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
    z_loss: float = 0.0,
) -> Tensor:
    """`vocab_parallel_cross_entropy(head(x), labels)`, a chunk of tokens after the other: the
    logits of a chunk are all that exists of them, and the backward computes them again (one more
    product of the head's size: 4 instead of 3).

    x [B, S, D] (or [B, S / n, D] where the head is sequence-parallel), labels [B, S] -> losses [B,
    S], in float32 at least. Peak memory beside x, its gradient and the weight's, which is added up
    in float32: the float32 logits of a chunk, and where the weight is 16 bits wide those, too.
    Sends what the head and the loss send; the input gradient's collective waits for all chunks.

    Example:
        >>> head = parallel3d.VocabParallelHead(64, 50257, tp=tp)
        >>> losses = parallel3d.head_cross_entropy(x, labels, head, chunk_tokens=1024)
        >>> losses.mean().backward()
    """
    x = head.enter(cast_input(x))
    terms = TokenLoss(head.axis, head.out_features, z_loss, chunk_tokens)
    losses: Tensor = outside_graph(_HeadCrossEntropy.apply, x, head.weight, labels, terms, head)
    return losses


class _HeadCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        terms: TokenLoss,
        head: ColumnParallelLinear,
    ) -> Tensor:
        ctx.weight = weight
        ctx.terms = terms
        ctx.head = head
        rows = local_tensor(weight)
        width = head.padded_width
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
        weight = ctx.weight
        fused = ctx.head.fused_gradients
        width = ctx.head.padded_width
        rows = local_tensor(weight).to(x.dtype)  # autocast had x in another type
        grad_x = x.new_empty(x.shape)
        # The chunks' gradients of the weight are added to its total, or else to a wide tensor.
        total = accumulated_gradient(weight) if fused else None
        grad_weight = total
        wide = wide_dtype(rows)
        if grad_weight is None or grad_weight.dtype != wide:
            grad_weight = torch.zeros_like(rows, dtype=wide)
        flat = (x.flatten(0, -2), labels.flatten(), lse, grad.flatten(), grad_x.flatten(0, -2))
        for part, own_labels, own_lse, own_grad, out in ctx.terms.chunks(*flat):
            logits = padded_product(part, rows, width)
            ctx.terms.backward(logits, own_labels, own_lse, own_grad, out=logits)
            grad_logits = logits[:, : len(rows)]  # in their memory
            torch.mm(grad_logits, rows, out=out)
            add_product(grad_weight, grad_logits, part)
            del logits, grad_logits  # before the next chunk's exist
        returned = None
        if grad_weight is not total:
            grad_weight = grad_weight.to(weight.dtype)
            returned = accumulate_or_return(weight, grad_weight, fused=fused)
        return grad_x, returned, None, None, None

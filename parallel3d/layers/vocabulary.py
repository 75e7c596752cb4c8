"""Token embedding and output head with the vocabulary split over tp.

`head_cross_entropy` fuses the head with its loss and holds the logits of only one chunk of tokens
at a time.

Shapes: B batch, S sequence, D hidden, V vocabulary, T = B S tokens, n = tp, w = ceil(V / n), w' = w
rounded up by `VocabParallelHead.pad_to`.

[Note: uneven vocabulary] Rank r has the ids r w <= id < min((r + 1) w, V), like an uneven DTensor
shard. Stored parameters are not padded: global shapes, state dicts and checkpoints match those of
one device. If ranks need equal widths, the head pads its logits instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from parallel3d.layers.collectives import gather, outside_graph, sum_partial
from parallel3d.layers.linear import (
    ColumnParallelLinear,
    cast_input,
    column_parallel,
    padded_product,
)
from parallel3d.layers.loss import TokenLoss, own_indices, wide_dtype
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec
from parallel3d.layers.weight_gradients import (
    accumulate_or_return,
    accumulated_gradient,
    add_product,
    local_tensor,
)
from parallel3d.shard_sizes import largest_shard

Forward = TypeVar("Forward", bound=Callable[..., Any])


class VocabParallelEmbedding(ParallelModule, nn.Embedding):
    """Token embedding with the vocabulary split over tp: ids [batch, seq] -> [batch, seq, hidden].

    Under sequence parallelism the output is [batch, seq / tp, hidden].

    Each tp rank looks up its own ids, and an all-reduce sums the results (Megatron-LM, arXiv
    1909.08053, section 3). Under sequence parallelism, the sum is a reduce-scatter in the forward
    pass, and the backward pass has an all-gather.

    tp need not divide vocab: see [Note: uneven vocabulary]. With tp > 1, an id outside the
    vocabulary gives zeros. Check ids first, as `data.loader` does.

    Args:
        vocab: Size of the vocabulary.
        hidden: Hidden size of the model.
        tp: Tensor-parallel axis or a `ParallelContext`.

    Raises:
        ValueError: The vocabulary is so small that a rank would have no row.

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
            # Adds only to the rows that were looked up. A dense gradient per microbatch costs more.
            add_rows(total, ids, grad)
            return None, None, None
        dense = torch.zeros_like(local_tensor(weight))
        add_rows(dense, ids, grad)
        return None, accumulate_or_return(weight, dense, fused=fused), None


def add_rows(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds grad [B, S, D] to the rows of `total` [w, D] that ids [B, S] select.

    Gradients of equal ids are summed in float32 and rounded once. Adding them one by one to a bf16
    row would lose most gradients of a frequent token.
    """
    ids = ids.flatten()
    grad = grad.flatten(0, -2)
    wide = wide_dtype(total)
    if total.dtype != wide:
        # Of the tokens with the same id, the one written last receives the sum. The others get 0.
        tokens = torch.arange(len(ids), device=ids.device)
        standing_for = tokens.new_empty(len(total)).index_put_((ids,), tokens)[ids]
        sums = torch.zeros_like(grad, dtype=wide)
        grad = sums.index_put_((standing_for,), grad.to(wide), accumulate=True)
    total.index_put_((ids,), grad.to(total.dtype), accumulate=True)


class VocabParallelHead(ColumnParallelLinear):
    """Output head with the vocabulary split over tp: x [B, S, D] -> logits [B, S, w'].

    Under sequence parallelism x is [B, S / n, D]. n = tp, and w' is the padded width per rank.

    tp need not divide out_features ([Note: uneven vocabulary]). If a rank has fewer logits than the
    width, the rest is -inf, which a softmax ignores. The weight may be tied to the embedding:
    `head.weight = embed.weight`.

    `head.pad_to(64)` aligns the rows of the logits, which speeds up GPU matmuls. The weight stays
    [V, D], so nothing padded is trained or saved. With padding, pass `vocab` to
    `vocab_parallel_cross_entropy`.

    If `is_deferred` is True, the forward pass returns x without communication. Compute the loss
    with `head_cross_entropy` or the logits with `logits`.

    Args:
        in_features: Hidden size of the model.
        out_features: Size of the vocabulary.
        tp: Tensor-parallel axis or a `ParallelContext`.

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
        """Pads each rank's logits to a width that is a multiple of `multiple`."""
        rows = largest_shard(self.out_features, self.axis.size)
        self.padded_width = -(-rows // multiple) * multiple

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_deferred else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        (logits,) = column_parallel(x, (self,))
        return logits


def ends_with_head(forward: Forward) -> Forward:
    """Decorator for the `forward` of a model whose result is the unchanged output of its `head`.

    The loss may then compute logits in chunks and reuse their memory for the gradient.
    """
    forward.ends_with_head = True  # type: ignore[attr-defined]
    return forward


def head_at_end(model: nn.Module) -> VocabParallelHead | None:
    """Returns the model's head if the model's output is that of the head, else None.

    Returns None if a subclass overrides `forward` of the head, or of the model without
    `ends_with_head`.
    """
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
    """Computes `vocab_parallel_cross_entropy(head(x), labels)` in chunks of tokens.

    Only the logits of one chunk exist at a time. The backward pass recomputes them, at the cost of
    one more matmul of the head: 4 instead of 3.

    Peak memory in addition to x, its gradient and the float32 gradient of the weight: the float32
    logits of a chunk, plus their 16-bit copy if the weight has 16 bits. Communication is that of
    the head and the loss. The collective of the input gradient starts after the last chunk.

    Args:
        x: Hidden states [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence
            parallelism.
        labels: Token ids [batch, seq]. Tokens labeled -100 are ignored.
        head: Output head.
        chunk_tokens: Tokens per chunk.
        z_loss: Coefficient of the z-loss.

    Returns:
        Losses [batch, seq], at least float32; 0 for ignored tokens.

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
        rows = local_tensor(weight).to(x.dtype)  # Under autocast the dtype of x differs.
        grad_x = x.new_empty(x.shape)
        # Chunks accumulate into the total gradient, or into a float32 tensor if its dtype is
        # narrower.
        total = accumulated_gradient(weight) if fused else None
        grad_weight = total
        wide = wide_dtype(rows)
        if grad_weight is None or grad_weight.dtype != wide:
            grad_weight = torch.zeros_like(rows, dtype=wide)
        flat = (x.flatten(0, -2), labels.flatten(), lse, grad.flatten(), grad_x.flatten(0, -2))
        for part, own_labels, own_lse, own_grad, out in ctx.terms.chunks(*flat):
            logits = padded_product(part, rows, width)
            ctx.terms.backward(logits, own_labels, own_lse, own_grad, out=logits)
            # A view: the gradient was written over the logits.
            grad_logits = logits[:, : len(rows)]
            torch.mm(grad_logits, rows, out=out)
            add_product(grad_weight, grad_logits, part)
            del logits, grad_logits  # Frees memory before the next chunk.
        returned = None
        if grad_weight is not total:
            grad_weight = grad_weight.to(weight.dtype)
            returned = accumulate_or_return(weight, grad_weight, fused=fused)
        return grad_x, returned, None, None, None

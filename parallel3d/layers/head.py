"""The output end of a vocabulary that is split over tp: the head that makes the logits, and head and loss in one, which
never holds the logits of more than a chunk of tokens.

Shapes: B batch, S sequence, D hidden, V vocabulary, T = B S tokens, n = tp, w = ceil(V / n), w' = w rounded up to
`pad_to_multiple_of`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.layers.init import normal
from parallel3d.layers.linear import ColumnParallelLinear, column_parallel, padded_product
from parallel3d.layers.loss import IGNORED, TokenLoss, chunks, wide_dtype
from parallel3d.layers.main_grad import accumulated_gradient, add_product
from parallel3d.layers.parameter import Initializer, accumulate_or_return, local_tensor, traced
from parallel3d.layers.placement import LayerTp
from parallel3d.layers.regions import all_gather_to_region, copy_to_region, gather_from_region
from parallel3d.row_split import largest_shard


class VocabParallelHead(ColumnParallelLinear):
    """x [B, S, D] (or [B, S / n, D] with `sequence_parallel`) -> logits [B, S, w'], or [B, S, V] with `gather_output`.

    A column-parallel linear whose output features tp need not divide ([Note: uneven vocabulary] in `embedding`): where
    a rank has fewer than w', its logits are filled up with -inf, which no softmax sees. Its weight may be the
    embedding's (`head.weight = embed.weight`). Sends what a `ColumnParallelLinear` sends.

    `pad_to_multiple_of`: a GPU multiplies faster into rows of logits that are aligned, of 64 numbers, say. The weight
    stays [V, D]: there is no padded row to train, save or export. The loss then has to be told `vocab`.

    With `is_deferred` forward gives x as it came, and sends nothing: who has x then makes the loss of it by
    `head_cross_entropy`, or the logits by `logits`.
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
        if pad_to_multiple_of < 1:
            raise ValueError(
                f"VocabParallelHead: pad_to_multiple_of = {pad_to_multiple_of}: must be at least 1; try 64"
            )
        self.rows_each = largest_shard(out_features, self.axis.size)
        self.padded_width = -(-self.rows_each // pad_to_multiple_of) * pad_to_multiple_of

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_deferred else self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        (logits,) = column_parallel(x, (self,))
        missing = self.padded_width - logits.shape[-1]
        if missing:
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        if self.gather_output:
            each = gather_from_region(logits, self.axis).unflatten(-1, (self.axis.size, self.padded_width))
            logits = each[..., : self.rows_each].flatten(-2)[..., : self.out_features]
        return logits


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
    """`vocab_parallel_cross_entropy(head(x), labels)`, a chunk of tokens after the other: the logits of a chunk are all
    that exists of them, and the backward computes them again (one more product of the head's size: 4 instead of 3).

    x [B, S, D] (or [B, S / n, D] where the head is sequence-parallel), labels [B, S] -> losses [B, S], in float32 at
    least. Peak memory beside x, its gradient and the weight's, which is added up in float32: the float32 logits of a
    chunk, and where the weight is 16 bits wide those, too. Sends what the head and the loss send; the input gradient's
    collective waits for all chunks.
    """
    if head.bias is not None or head.gather_output:
        raise ValueError("head_cross_entropy: needs a head without bias whose output is not gathered")
    axis = head.axis
    x = all_gather_to_region(x, axis) if head.sequence_parallel else copy_to_region(x, axis)
    token_loss = TokenLoss(axis, head.out_features, ignore_index, label_smoothing, z_loss)
    compiling = is_compiling()
    weight = traced(head.weight, head, "weight") if compiling else head.weight
    fused = head.fused_gradients and not compiling
    losses: Tensor = _HeadCrossEntropy.apply(x, weight, labels, token_loss, chunk_tokens, fused, head.padded_width)
    return losses


class _HeadCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_loss: TokenLoss,
        chunk_tokens: int,
        fused: bool,
        width: int | None,
    ) -> Tensor:
        ctx.weight, ctx.token_loss, ctx.chunk_tokens, ctx.fused, ctx.width = (
            weight,
            token_loss,
            chunk_tokens,
            fused,
            width,
        )
        rows = local_tensor(weight)
        parts = [
            token_loss.forward(padded_product(part, rows, width), own_labels, overwrite=True)
            for part, own_labels in chunks(chunk_tokens, x.flatten(0, -2), labels.flatten())
        ]
        losses, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(x, labels, lse)
        return losses.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, lse = ctx.saved_tensors
        rows, weight = local_tensor(ctx.weight), ctx.weight
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_weight, given = _where_to_add(weight, fused=ctx.fused)
        flat = (x.flatten(0, -2), labels.flatten(), lse, grad.flatten(), grad_x.flatten(0, -2))
        for part, own_labels, own_lse, own_grad, out in chunks(ctx.chunk_tokens, *flat):
            logits = padded_product(part, rows, ctx.width)
            grad_logits = ctx.token_loss.backward(logits, own_labels, own_lse, own_grad, overwrite=True).to(rows.dtype)
            grad_logits = grad_logits[:, : rows.shape[0]]
            torch.mm(grad_logits, rows, out=out)
            add_product(grad_weight, grad_logits, part)
            del logits, grad_logits  # before the next chunk's exist
        if not given:
            result = accumulate_or_return(weight, grad_weight.to(rows.dtype), fused=ctx.fused)
            return grad_x, result, None, None, None, None, None
        return grad_x, None, None, None, None, None, None


def _where_to_add(weight: Tensor, *, fused: bool) -> tuple[Tensor, bool]:
    """The tensor that the chunks' weight gradients are added to, and whether it is the weight's total itself."""
    rows = local_tensor(weight)
    total = accumulated_gradient(weight) if fused else None
    if total is not None and total.dtype == wide_dtype(rows):
        return total, True
    return torch.zeros_like(rows, dtype=wide_dtype(rows)), False

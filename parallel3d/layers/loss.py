"""Cross-entropy over a vocabulary split over tp, without gathering the logits.

    loss = lse - logit[label] + z * lse^2,    lse = log(sum of exp(logits))

z is the coefficient of the z-loss (Chowdhery et al. 2022, arXiv 2204.02311, section 5). The
gradient of the logits is softmax * (1 + 2 z lse) - one_hot(label).

Arithmetic is float32, or float64 for float64 logits. The forward pass saves the logits as given,
the labels, and lse. `chunk_tokens` limits the float32 temporaries of both passes.

Shapes: T tokens, V vocabulary, w = ceil(V / n) local width, n = tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.layers.collectives import all_reduce, outside_graph
from parallel3d.mesh import Axis

IGNORED = -100  # Label of tokens without a loss, as in torch.
PLAIN_BELOW_ELEMENTS = 2**17  # Number of logits below which torch's own loss is faster.


@dataclass(frozen=True)
class TokenLoss:
    """Computes the loss of tokens whose logits are split along the vocabulary over an axis.

    Args:
        axis: Tensor-parallel axis. `shard_sizes.shard_rows` gives the shard of each rank.
        vocab: Size of the full vocabulary.
        z_loss: Coefficient of the z-loss.
        chunk_tokens: Tokens per chunk. None means all.
    """

    axis: Axis
    vocab: int
    z_loss: float = 0.0
    chunk_tokens: int | None = None

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = max(self.chunk_tokens or len(tensors[0]), 1)
        return zip(*(tensor.split(size) for tensor in tensors), strict=True)

    def forward(
        self, logits: Tensor, labels: Tensor, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns losses [T] and lse [T] of logits [T, w] and labels [T], equal on every rank.

        Two all-reduces over tp: the maximum (one number per token), then two sums (two numbers per
        token). `overwrite` allows reuse of the logits' memory.
        """
        own, elsewhere = own_indices(labels, self.axis.rows(self.vocab))
        largest = all_reduce(logits.amax(dim=-1).to(wide_dtype(logits)), self.axis, "max")
        out = logits if overwrite and logits.dtype == largest.dtype else None
        shifted = torch.sub(logits, largest.unsqueeze(-1), out=out)
        label_logit = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        sums = torch.stack((label_logit, shifted.exp_().sum(dim=-1)))
        label_logit, exp_sum = all_reduce(sums, self.axis)
        log_sum = exp_sum.log()  # Both terms are relative to the shifted logits.
        losses = log_sum - label_logit
        lse = log_sum + largest
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
        return losses.masked_fill(labels == IGNORED, 0.0), lse

    def backward(
        self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, out: Tensor
    ) -> None:
        """Writes the gradient [T, w] of the logits into `out`, which may be the logits themselves.

        `grad` [T] is the gradient of the losses. No communication.
        """
        own, elsewhere = own_indices(labels, self.axis.rows(self.vocab))
        lse = lse.unsqueeze(-1)
        result = out if out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
        torch.sub(logits, lse, out=result).exp_()
        if self.z_loss:
            result.mul_(1.0 + 2.0 * self.z_loss * lse)
        at_label = elsewhere.to(lse.dtype).sub_(1.0)  # -1 if this rank has the label, else 0.
        result.scatter_add_(-1, own.unsqueeze(-1), at_label.unsqueeze(-1))
        result.mul_(grad.masked_fill(labels == IGNORED, 0.0).unsqueeze(-1))
        out.copy_(result)  # No copy if both are the same tensor.


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: DeviceMesh | None = None,
    *,
    vocab: int | None = None,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Computes the cross-entropy of each token from logits that are split over tp.

    Two all-reduces per chunk in the forward pass, of one and two numbers per token. No
    communication in the backward pass.

    Args:
        logits: Local logits [batch, seq, ceil(vocab / tp)] of this rank.
        labels: Token ids [batch, seq], equal on all tp ranks. Tokens labeled -100 are ignored.
        tp: Tensor-parallel axis.
        vocab: Size of the vocabulary. Required if tp does not divide it or if the logits are
            padded, as those of a `VocabParallelHead`. Default: the sum of the local widths.
        z_loss: Coefficient of the z-loss.
        chunk_tokens: Tokens per chunk, which limits memory. Default: all.

    Returns:
        Losses [batch, seq], equal on every tp rank; 0 for ignored tokens. float32, or float64 for
        float64 logits.

    Example:
        >>> logits, labels = torch.zeros(2, 8, 256), torch.zeros(2, 8, dtype=torch.int64)
        >>> parallel3d.vocab_parallel_cross_entropy(logits, labels).mean()
        tensor(5.5452)
    """
    axis = Axis.of(tp)
    vocab = vocab or logits.shape[-1] * axis.size
    terms = TokenLoss(axis, vocab, z_loss, chunk_tokens)
    return token_losses(logits, labels, terms)


def token_losses(
    logits: Tensor, labels: Tensor, terms: TokenLoss, *, overwrite_logits: bool = False
) -> Tensor:
    """Returns the losses [batch, seq] of `vocab_parallel_cross_entropy`.

    With `overwrite_logits`, the backward pass may write the gradient into the memory of the logits.
    """
    is_small = terms.chunk_tokens is None and logits.numel() < PLAIN_BELOW_ELEMENTS
    if terms.axis.size == 1 and terms.vocab == logits.shape[-1] and not terms.z_loss and is_small:
        wide = logits.to(wide_dtype(logits)).flatten(0, -2)
        return F.cross_entropy(wide, labels.flatten(), reduction="none").view_as(labels)
    losses: Tensor = outside_graph(_CrossEntropy.apply, logits, labels, terms, overwrite_logits)
    return losses


def own_indices(indices: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Returns indices relative to `rows`, and a mask of those outside of them, which become 0."""
    own = indices - rows.start
    elsewhere = (own < 0) | (own >= len(rows))
    return own.masked_fill(elsewhere, 0), elsewhere


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which the loss of `x` is computed, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: TokenLoss, overwrite: bool
    ) -> Tensor:
        ctx.terms = terms
        ctx.overwrite = overwrite
        chunks = terms.chunks(logits.flatten(0, -2), labels.flatten())
        parts = [terms.forward(*chunk) for chunk in chunks]
        losses, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(logits, labels, lse)
        return losses.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        flat = logits.flatten(0, -2)  # Copies if the logits are not contiguous.
        out = flat if ctx.overwrite else torch.empty_like(flat)
        for part in ctx.terms.chunks(flat, labels.flatten(), lse, grad.flatten(), out):
            ctx.terms.backward(*part)
        return out.view_as(logits), None, None, None

"""Cross-entropy over a vocabulary that is split over tp, without gathering the logits.

    loss = lse - (1 - s) logit[label] - s / V * (sum of all logits) + z * lse^2,    lse = log(sum of exp(logits))

with label smoothing s (Szegedy et al. 2016, arXiv 1512.00567, section 7; as torch's) and z-loss z
(Chowdhery et al. 2022, arXiv 2204.02311, section 5). Its gradient by the logits is softmax * (1 + 2
z lse) - (1 - s) [label] - s / V.

Arithmetic is float32 at least, whatever the logits are. What is kept for the backward is the logits
as they came and one number a token; `chunk_tokens` bounds the wide temporaries, forward and
backward, to so many tokens at a time.

Shapes: T tokens, V vocabulary, w = ceil(V / n) this rank's part, n = tp.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.layers.collectives import all_reduce, all_reduce_max
from parallel3d.mesh import Axis
from parallel3d.shard_sizes import shard_rows

# logits so few that torch's own loss is faster than a function in Python
PLAIN_BELOW_ELEMENTS = 2**17
IGNORED = -100  # the label of a token without a loss, as in torch


@dataclass(frozen=True)
class TokenLoss:
    """How the loss of a token is computed from logits whose vocabulary, of `vocab` entries in all,
    is split over an axis by `shard_sizes.shard_rows`, `chunk_tokens` tokens at a time (None:
    all of them)."""

    axis: Axis
    vocab: int
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields the same tokens of each of the tensors [T, ...], chunk after chunk."""
        size = max(self.chunk_tokens or len(tensors[0]), 1)
        return zip(*(tensor.split(size) for tensor in tensors), strict=True)

    def forward(
        self, logits: Tensor, labels: Tensor, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Computes, of logits [T, w] and labels [T], losses [T] and lse [T], the same on every
        rank. Sends two all-reduces over tp: the largest logit, then the sums, of one and two (with
        smoothing three) numbers a token. `overwrite`: the memory of the logits is used again,
        because nobody reads them any more."""
        own, elsewhere, valid = self._own_labels(labels, logits.shape[-1])
        largest = all_reduce_max(logits.amax(dim=-1).to(wide_dtype(logits)), self.axis)
        shifted = _minus(logits, largest, overwrite)
        sums = [shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)]
        if self.label_smoothing:
            sums.append(shifted[:, :valid].sum(dim=-1))
        sums.append(shifted.exp_().sum(dim=-1))
        label_logit, *logit_sum, exp_sum = all_reduce(torch.stack(sums), self.axis)
        log_sum = exp_sum.log()  # all three are sums of the shifted logits
        losses = log_sum - label_logit
        if self.label_smoothing:
            smooth = log_sum - logit_sum[0] / self.vocab
            losses = (1.0 - self.label_smoothing) * losses + self.label_smoothing * smooth
        lse = log_sum + largest
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
        return losses.masked_fill(labels == self.ignore_index, 0.0), lse

    def backward(
        self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, *, overwrite: bool = False
    ) -> Tensor:
        """Returns the gradient [T, w] by the logits where `grad` [T] is the one by the losses, in
        float32 at least. Nothing is sent."""
        own, elsewhere, valid = self._own_labels(labels, logits.shape[-1])
        result = _minus(logits, lse, overwrite).exp_()
        lse = lse.unsqueeze(-1)
        if self.z_loss:
            result.mul_(1.0 + 2.0 * self.z_loss * lse)
        if self.label_smoothing:
            result[:, :valid].sub_(self.label_smoothing / self.vocab)
        at_label = (~elsewhere).to(lse.dtype).mul_(self.label_smoothing - 1.0)
        result.scatter_add_(-1, own, at_label.unsqueeze(-1))
        return result.mul_(grad.masked_fill(labels == self.ignore_index, 0.0).unsqueeze(-1))

    def _own_labels(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor, int]:
        """Returns labels [T, 1] as columns of this rank (0 for those of another rank), which [T]
        are another rank's, and how many of the columns are of the vocabulary: a head may have
        filled up the others."""
        rows = shard_rows(self.vocab, self.axis.rank, self.axis.size)
        own, valid = labels - rows.start, min(width, len(rows))
        elsewhere = (own < 0) | (own >= valid)
        return own.masked_fill(elsewhere, 0).unsqueeze(-1), elsewhere, valid


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: DeviceMesh | None = None,
    *,
    vocab: int | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Returns the loss of each token, in float32 (float64 for such logits), the same on every tp
    rank; 0 where the label is `ignore_index`.

    logits [batch, seq, w], labels [batch, seq] -> [batch, seq]. `vocab`: the true size where the
    logits are a `VocabParallelHead`'s that tp does not divide (label smoothing has to know) or that
    are filled up to a multiple. Sends two all-reduces forward for every chunk (`TokenLoss.forward`)
    and nothing backward.
    """
    axis = Axis.of(tp)
    vocab = vocab or logits.shape[-1] * axis.size
    return token_losses(
        logits, labels, TokenLoss(axis, vocab, ignore_index, label_smoothing, z_loss, chunk_tokens)
    )


def token_losses(
    logits: Tensor, labels: Tensor, terms: TokenLoss, *, overwrite_logits: bool = False
) -> Tensor:
    """Returns the losses [batch, seq] of `vocab_parallel_cross_entropy`. With `overwrite_logits`
    the backward makes the gradient of the logits in their memory: nobody may read them after it."""
    is_small = terms.chunk_tokens is None and logits.numel() < PLAIN_BELOW_ELEMENTS
    if terms.axis.size == 1 and terms.vocab == logits.shape[-1] and not terms.z_loss and is_small:
        plain = F.cross_entropy(
            logits.to(wide_dtype(logits)).flatten(0, -2),
            labels.flatten(),
            ignore_index=terms.ignore_index,
            label_smoothing=terms.label_smoothing,
            reduction="none",
        )
        return plain.view_as(labels)
    losses: Tensor = _CrossEntropy.apply(logits, labels, terms, overwrite_logits)
    return losses


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that losses of `x` are computed in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _minus(logits: Tensor, of_token: Tensor, overwrite: bool) -> Tensor:
    """Returns logits [T, w] - of_token [T], in the dtype of `of_token`."""
    wide = logits.to(of_token.dtype)
    of_token = of_token.unsqueeze(-1)
    return wide.sub_(of_token) if overwrite or wide is not logits else wide - of_token


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: TokenLoss, overwrite: bool
    ) -> Tensor:
        ctx.terms, ctx.overwrite = terms, overwrite
        chunks = terms.chunks(logits.flatten(0, -2), labels.flatten())
        parts = [terms.forward(*chunk) for chunk in chunks]
        losses, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(logits, labels, lse)
        return losses.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        flat = logits.flatten(0, -2)  # a copy if the logits are not contiguous
        chunks = ctx.terms.chunks(flat, labels.flatten(), lse, grad.flatten())
        if ctx.overwrite:
            for part in chunks:
                grad_logits = ctx.terms.backward(*part, overwrite=True)
                if grad_logits.dtype != logits.dtype:  # else it has been made where the logits were
                    part[0].copy_(grad_logits)
            return flat.view_as(logits), None, None, None
        parts = [ctx.terms.backward(*part).to(logits.dtype) for part in chunks]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).view_as(logits), None, None, None

"""Cross-entropy over a vocabulary that is split over tp, without gathering the logits.

    loss = lse - (1 - s) logit[label] - s / V * (sum of all logits) + z * lse^2,    lse = log(sum of exp(logits))

with label smoothing s (Szegedy et al. 2016, arXiv 1512.00567, section 7; as torch's) and z-loss z (Chowdhery et al.
2022, arXiv 2204.02311, section 5). Its gradient by the logits is softmax * (1 + 2 z lse) - (1 - s) [label] - s / V.

Arithmetic is float32 at least, whatever the logits are. What is kept for the backward is the logits as they came and
one number a token; `chunk_tokens` bounds the wide temporaries, forward and backward, to so many tokens at a time.

Shapes: T tokens, V vocabulary, w = ceil(V / n) this rank's part, n = tp.
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

from parallel3d.layers.collectives import all_reduce, all_reduce_max
from parallel3d.mesh import Axis

PLAIN_BELOW_ELEMENTS = 2**17  # logits so few that torch's own loss is faster than a function in Python
IGNORED = -100  # the label of a token without a loss, as in torch


@dataclass(frozen=True)
class TokenLoss:
    """What the loss of a token is, and which part of the vocabulary this rank has: `vocab` in all, from `first` on."""

    axis: Axis
    vocab: int
    first: int
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def forward(self, logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
        """logits [T, w], labels [T] -> losses [T] and lse [T], the same on every rank. Sends two all-reduces over tp:
        the largest logit, then the sums, of one and two (with smoothing three) numbers a token. `overwrite`: nobody
        needs the logits any more, and their memory may be used."""
        own, elsewhere = self._own_labels(labels, logits.shape[-1])
        largest = all_reduce_max(logits.amax(dim=-1).to(wide_dtype(logits)), self.axis)
        shifted = _minus(logits, largest, overwrite)
        sums = [shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)]
        if self.label_smoothing:
            sums.append(shifted[:, : self._valid(logits.shape[-1])].sum(dim=-1))
        sums.append(shifted.exp_().sum(dim=-1))
        label_logit, *logit_sum, exp_sum = all_reduce(torch.stack(sums), self.axis)
        log_sum = exp_sum.log()  # of the shifted logits, as the two others are
        losses = log_sum - label_logit
        if self.label_smoothing:
            smooth = log_sum - logit_sum[0] / self.vocab
            losses = (1.0 - self.label_smoothing) * losses + self.label_smoothing * smooth
        lse = log_sum + largest
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
        return losses.masked_fill(labels == self.ignore_index, 0.0), lse

    def backward(self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, *, overwrite: bool = False) -> Tensor:
        """The gradient [T, w] by the logits where `grad` [T] is the one by the losses; wide. Nothing is sent."""
        own, elsewhere = self._own_labels(labels, logits.shape[-1])
        result = _minus(logits, lse, overwrite).exp_()
        lse = lse.unsqueeze(-1)
        if self.z_loss:
            result.mul_(1.0 + 2.0 * self.z_loss * lse)
        if self.label_smoothing:
            result[:, : self._valid(logits.shape[-1])].sub_(self.label_smoothing / self.vocab)
        at_label = (~elsewhere).to(lse.dtype).mul_(self.label_smoothing - 1.0)
        result.scatter_add_(-1, own, at_label.unsqueeze(-1))
        return result.mul_(grad.masked_fill(labels == self.ignore_index, 0.0).unsqueeze(-1))

    def _own_labels(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Labels [T, 1] as columns of this rank (0 for those of another's), and which [T] are another's."""
        own = labels - self.first
        elsewhere = (own < 0) | (own >= self._valid(width))
        return own.masked_fill(elsewhere, 0).unsqueeze(-1), elsewhere

    def _valid(self, width: int) -> int:
        """How many of the columns are of the vocabulary: a head may have filled them up."""
        return min(width, -(-self.vocab // self.axis.size), self.vocab - self.first)


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
    overwrite_logits: bool = False,
) -> Tensor:
    """The loss of each token, in float32 (float64 for such logits), the same on every tp rank; 0 where ignored.

    logits [batch, seq, w], labels [batch, seq] -> [batch, seq]. `vocab`: the true size where the logits are a
    `VocabParallelHead`'s that tp does not divide (label smoothing has to know) or that are filled up to a multiple.
    `overwrite_logits`: nobody reads them after the backward, which may then make their gradient in their memory. Sends
    two all-reduces forward for every chunk (`TokenLoss.forward`) and nothing backward.
    """
    axis = Axis.of(tp)
    width = logits.shape[-1]
    is_small = chunk_tokens is None and logits.numel() < PLAIN_BELOW_ELEMENTS
    if axis.size == 1 and vocab in (None, width) and not z_loss and is_small:
        wide = logits.to(wide_dtype(logits)).flatten(0, -2)
        plain = F.cross_entropy(
            wide, labels.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
        )
        return plain.view_as(labels)
    size = vocab or width * axis.size
    first = axis.rank * -(-size // axis.size)
    how = TokenLoss(axis, size, first, ignore_index, label_smoothing, z_loss)
    losses: Tensor = _CrossEntropy.apply(logits, labels, how, chunk_tokens or labels.numel(), overwrite_logits)
    return losses


def wide_dtype(x: Tensor) -> torch.dtype:
    """What losses of `x` are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def _minus(logits: Tensor, of_token: Tensor, overwrite: bool) -> Tensor:
    """logits [T, w] - of_token [T], in the dtype of the latter."""
    wide = logits.to(of_token.dtype)
    of_token = of_token.unsqueeze(-1)
    return wide.sub_(of_token) if overwrite or wide is not logits else wide - of_token


def chunks(chunk_tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors [T, ...] in step, so many tokens at a time."""
    return zip(*(tensor.split(max(chunk_tokens, 1)) for tensor in tensors), strict=True)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, how: TokenLoss, chunk_tokens: int, overwrite: bool) -> Tensor:
        ctx.how, ctx.chunk_tokens, ctx.overwrite = how, chunk_tokens, overwrite
        parts = [how.forward(*part) for part in chunks(chunk_tokens, logits.flatten(0, -2), labels.flatten())]
        losses, lse = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True))
        ctx.save_for_backward(logits, labels, lse)
        return losses.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        flat = (logits.flatten(0, -2), labels.flatten(), lse, grad.flatten())
        if ctx.overwrite:
            for part in chunks(ctx.chunk_tokens, *flat):
                grad_logits = ctx.how.backward(*part, overwrite=True)
                if grad_logits.dtype != logits.dtype:  # else it has been made where the logits were
                    part[0].copy_(grad_logits)
            return logits, None, None, None, None
        parts = [ctx.how.backward(*part).to(logits.dtype) for part in chunks(ctx.chunk_tokens, *flat)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).view_as(logits), None, None, None, None

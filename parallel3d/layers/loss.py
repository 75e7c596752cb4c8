"""Cross-entropy over a vocabulary that is split over tp, without gathering the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import DeviceMesh

from parallel3d.layers.collectives import all_reduce, all_reduce_max
from parallel3d.mesh import Axis


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: DeviceMesh | None = None) -> Tensor:
    """-log softmax(logits)[label] of each token, in float32, the same on every tp rank.

    logits [batch, seq, vocab / tp], labels [batch, seq] -> [batch, seq]. Sends two all-reduces forward (the largest
    logit; the sum of exponentials with the label's logit), of one and two numbers a token, and nothing backward.
    """
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, Axis.of(tp))
    return losses


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
        own = labels - axis.rank * logits.shape[-1]
        elsewhere = (own < 0) | (own >= logits.shape[-1])  # labels of another rank's part of the vocabulary
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)

        largest = all_reduce_max(logits.amax(dim=-1).float(), axis)
        shifted = logits.float() - largest.unsqueeze(-1)
        label_logit = shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        exp_sum, label_logit = all_reduce(torch.stack((exponentials.sum(dim=-1), label_logit)), axis)

        softmax = exponentials.div_(exp_sum.unsqueeze(-1))
        ctx.save_for_backward(softmax, own, elsewhere)
        ctx.dtype = logits.dtype
        return exp_sum.log() - label_logit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, elsewhere = ctx.saved_tensors
        is_label = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        # In place: it is the largest tensor of all, and a second backward is refused by the version it then has.
        grad_logits = softmax.scatter_add_(-1, own, -is_label).mul_(grad.unsqueeze(-1))
        return grad_logits.to(ctx.dtype), None, None

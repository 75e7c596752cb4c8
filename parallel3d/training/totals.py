"""The sums of a training step over all ranks: loss, gradient norm, labels, and the votes to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.data.loader import IGNORED
from parallel3d.errors import DataError
from parallel3d.layers.collectives import all_reduce_over
from parallel3d.mesh import Axis
from parallel3d.training.loss import MeanLoss


@dataclass(frozen=True)
class StepTotals:
    """The sums of one step, the same on every rank. Gradients times `factor` are the gradients of the mean loss over
    the step's labels."""

    loss: float  # mean over the labels
    grad_norm: float  # before clipping
    tokens: int  # that have a label
    factor: float
    own_norm: float  # of this rank's replica, which clips by it; grad_norm where the replicas are one run
    is_asked_to_stop: bool  # some rank received SIGTERM

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def sum_totals(
    axes: Mapping[str, Axis],
    loss_fn: MeanLoss,
    loss: Tensor,
    labels: Tensor,
    square: Tensor,
    *,
    is_asked_to_stop: bool = False,
) -> StepTotals:
    """Sums this rank's loss, labels, share `square` of the squared gradient norm, and vote to stop over `axes`, in one
    all-reduce an axis.

    The loss is equal on all tp ranks, so each adds its share of it. The labels of a data rank are the same along tp and
    pp, so the first rank of both axes adds them."""
    tp, pp = axes["tp"], axes["pp"]
    real = count_labels(labels) * (tp.rank == 0 and pp.rank == 0)
    vote = torch.full_like(real, float(is_asked_to_stop))
    sums = all_reduce_over(axes, torch.stack((loss.double() / tp.size, square.to(labels.device), real, vote)))
    nominal_loss, total_square, tokens, votes = sums.tolist()
    factor = loss_fn.tokens / max(tokens, 1.0) / loss_fn.scale
    norm = total_square**0.5 * factor
    return StepTotals(nominal_loss * factor, norm, round(tokens), factor, own_norm=norm, is_asked_to_stop=votes > 0)


def count_labels(labels: Tensor) -> Tensor:
    """The number of labels that are learned, a float64 scalar on the labels' device."""
    return (labels != IGNORED).sum().double()


def refuse_no_labels(step: int, tokens: int, ignored_ids: Sequence[int]) -> None:
    """Raises DataError where no token of a step's global batch has a label."""
    if not tokens:
        raise DataError(
            f"step {step}: no token of the batch has a label; data.ignore_token_ids = {list(ignored_ids)} are not "
            "learned. Try fewer of them"
        )

"""Result of a training step, and checks of its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from parallel3d.data.loader import WrongId
from parallel3d.errors import DataError
from parallel3d.training.expert_load import ExpertLoad


@dataclass(frozen=True)
class StepResult:
    """Result of a training step, equal on all ranks of a replica.

    With local SGD, only `factor` and `own_norm` differ between replicas.

    Args:
        loss: Mean over the target tokens of the global batch, in nats. Includes the z-loss.
        grad_norm: Gradient norm before clipping. With local SGD, the root mean square over the
            replicas.
        tokens: Target tokens, that is, non-ignored labels.
        factor: Factor that turns the gradients into those of the mean loss over the target tokens.
        own_norm: Gradient norm of this rank's replica, by which it clips.
        is_asked_to_stop: True if any rank has a request to stop or save, or a failed save.
        lr: Learning rate.
        loss_scale: Loss scale, or None without float16.
        skip_reason: Reason why the step was skipped, or None. It is also None for a step that is
            skipped only to lower the loss scale.
        spike: Description of a spike in loss or gradient norm, or None.
        expert_load: Load of the experts, or None for a model without experts.
    """

    loss: float
    grad_norm: float
    tokens: int
    factor: float
    own_norm: float
    is_asked_to_stop: bool
    lr: float
    loss_scale: float | None
    skip_reason: str | None = None
    spike: str | None = None
    expert_load: ExpertLoad | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_skipped(self) -> bool:
        """True if the optimizer did not apply the step."""
        return not self.is_finite or self.skip_reason is not None


class StepTotals(NamedTuple):
    """Totals of a step over the mesh, as float64 scalars on the device."""

    loss: Tensor  # Mean over the target tokens.
    grad_norm: Tensor
    tokens: Tensor
    votes: Tensor  # Number of ranks with a request to stop or save, or a failed save.
    refusals: Tensor  # Below 0 if any rank read an id outside the vocabulary.


def refuse_no_labels(step: int, tokens: int, ignored_ids: Sequence[int]) -> None:
    """Raises DataError if `tokens`, the number of target tokens, is 0."""
    if not tokens:
        raise DataError(
            f"step {step}: no target token in the batch, because data.ignore_token_ids = "
            f"{list(ignored_ids)} are ignored; try fewer of them"
        )


def refuse_wrong_id(own: WrongId | None, vocab: int) -> NoReturn:
    """Raises DataError for the first sample with an id outside the vocabulary. Collective.

    `own` is the wrong id that this rank found, or None.
    """
    everyone: list[WrongId | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = [wrong for wrong in everyone if wrong is not None]
    first = min(found)
    largest = max(wrong.largest_id for wrong in found)
    tries = f"model.vocab={largest + 1} or more, or " if largest >= vocab else ""
    raise DataError(
        f"token id {first.token_id} at sample {first.sample}: model.vocab = {vocab} has ids 0 to "
        f"{vocab - 1}; try {tries}data encoded with this model's tokenizer"
    )

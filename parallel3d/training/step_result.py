"""The result of a training step, and the checks of the batch that it was computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from parallel3d.data.loader import WrongId
from parallel3d.errors import DataError


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank. Gradients times `factor` are the gradients of
    the mean loss over the step's labels."""

    loss: float  # mean over the labels of the global batch
    grad_norm: float  # before clipping; with local SGD the root mean square over the replicas
    tokens: int  # that have a label
    factor: float
    own_norm: float  # the norm by which this rank's replica clips
    is_asked_to_stop: bool  # some rank received SIGTERM
    lr: float
    loss_scale: float | None  # None: training is not in float16
    left_out: str | None = None  # why the guard has left the step out, for the user to read
    spike: str | None = None  # a loss or norm that stands out, for the user to read

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_skipped(self) -> bool:
        """True if the optimizer has not stepped."""
        return not self.is_finite or self.left_out is not None


class StepTotals(NamedTuple):
    """The sums of a step over the mesh, while they are on the device: float64 scalars."""

    loss: Tensor  # mean over the labels
    grad_norm: Tensor
    tokens: Tensor
    votes: Tensor  # ranks that received SIGTERM; with local SGD the mean over the replicas
    refusals: Tensor  # below 0 if any rank read an id beyond the vocabulary


def refuse_no_labels(step: int, tokens: int, ignored_ids: Sequence[int]) -> None:
    """Raises DataError if no token of a step's global batch has a label."""
    if not tokens:
        raise DataError(
            f"step {step}: no token of the batch has a label; data.ignore_token_ids = "
            f"{list(ignored_ids)} are not learned. Try fewer of them"
        )


def refuse_wrong_id(own: WrongId | None, vocab: int) -> NoReturn:
    """Raises DataError about the first sample of the batch that has an id beyond `vocab`, the same
    on every rank. Every rank calls it with what it has found itself."""
    everyone: list[WrongId | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = [wrong for wrong in everyone if wrong is not None]
    first = min(found)
    largest = max(wrong.largest_id for wrong in found)
    tries = f"model.vocab={largest + 1} or more, or " if largest >= vocab else ""
    raise DataError(
        f"token id {first.token_id} at sample {first.sample}: model.vocab = {vocab} has ids 0 to "
        f"{vocab - 1}; try {tries}the data of this model's tokenizer"
    )

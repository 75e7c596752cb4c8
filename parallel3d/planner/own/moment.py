"""One moment of a step: what a rank holds then beside what is at rest."""

from __future__ import annotations

from typing import Literal, NamedTuple

What = Literal["forward", "first backward", "backward", "last backward", "optimizer's step"]


class Moment(NamedTuple):
    """Bytes beside what is at rest."""

    what: What
    gradients: float
    activations: float
    logits: float
    buffers: float
    temporary: float


def total(moment: Moment) -> float:
    return moment[1] + moment[2] + moment[3] + moment[4] + moment[5]


class Around(NamedTuple):
    """What other stages and other microbatches hold during an action, and the stage's own gradients and gathered
    parameters when it begins."""

    gradients: float
    activations: float
    logits: float
    gathered: float
    waiting: float  # between stages, and the last buckets of those that are done, where gradients are sent whole
    own_gradients: float

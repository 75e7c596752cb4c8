"""What a few steps of training leave behind, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.recipe import ParallelConfig

Array = NDArray[np.floating]
# name -> rank -> what that rank sees; ranks that see the same share an array
Views = dict[str, dict[int, Array]]


@dataclass
class StepRecord:
    """One step of training. `activations` are each rank's own part, of all its microbatches."""

    loss: float
    grad_norm: float
    activations: Views
    gradients: Views
    parameters: Views  # after the step


@dataclass
class TrainingRecord:
    """A run's layout, its first weights, as the model was initialised and as they were jittered,
    and its steps."""

    parallel: ParallelConfig
    initial: Views = field(default_factory=dict)
    start: Views = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    parameter_count: int = 0  # as the trainer counts them
    # loss and gradient norm of every step
    curve: list[tuple[float, float]] = field(default_factory=list)

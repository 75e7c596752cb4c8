"""Recorded values of a few training steps, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.recipe import ParallelConfig

Array = NDArray[np.floating]
# Each rank's view of a tensor, keyed by name and then by rank. Ranks with equal views share an
# array.
Views = dict[str, dict[int, Array]]


@dataclass
class StepRecord:
    """Values of one training step. `activations` has each rank's own shards, with its microbatches
    concatenated. All other tensors are full ones.
    """

    loss: float
    grad_norm: float
    activations: Views
    gradients: Views
    parameters: Views  # Parameters after the step.
    loads: Views = field(default_factory=dict)  # Tokens of each expert, by router.


@dataclass
class TrainingRecord:
    """Record of a run: its layout, the initial weights, the same with noise at the start, and the
    steps whose tensors were kept.
    """

    parallel: ParallelConfig
    initial: Views = field(default_factory=dict)
    start: Views = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    parameter_count: int = 0  # Number of parameters, as the trainer counts them.
    # Loss and gradient norm of each step.
    curve: list[tuple[float, float]] = field(default_factory=list)

"""Interface between the trainer and an outer loop, which synchronizes replicas every few steps.

`local_sgd` implements it. You can pass your own to `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from parallel3d.checkpoint.files import MODEL
from parallel3d.checkpoint.manifest import SavedReplicas
from parallel3d.diagnosis.replicas import Copies
from parallel3d.mesh import Axis
from parallel3d.training.step_result import StepTotals

if TYPE_CHECKING:
    from parallel3d.training.trainer import Trainer

Tensors = dict[str, Tensor]  # Keyed by their names in a checkpoint.


class OuterLoop:
    """Base class of outer loops, and the outer loop of a synchronous run, which does nothing.

    An outer loop of your own must override all methods. They are called on all ranks together.
    """

    def combine(self, totals: StepTotals) -> StepTotals:
        """Combines the totals of this replica with those of the others, on the device."""
        return totals

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Called after each step, even a skipped one, before the model uses the new parameters.

        Args:
            step: Step number.
            is_last: True in a second call after a step that ends the run early. The replicas must
                then become equal, as after the last step of the recipe.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Context manager in which the model computes with the parameters to evaluate."""
        return nullcontext()

    def copies(self) -> list[Copies]:
        """Returns the tensors that must be equal on all replicas."""
        return []

    def begin(self) -> None:
        """Called after only the weights of a checkpoint were loaded into the parameters."""

    def save(self, state: Tensors) -> tuple[Tensors, SavedReplicas | None]:
        """Returns the tensors of a checkpoint and the value of `Progress.local_sgd`.

        Args:
            state: Tensors of this replica.
        """
        return state, None

    def tensors_to_load(self, state: Tensors, saved: SavedReplicas | None) -> Tensors:
        """Maps names in a checkpoint to the tensors to load.

        A synchronous run reads the outer parameters, and the other tensors of the first replica.

        Args:
            state: Tensors of this replica.
            saved: Replicas of the run that wrote the checkpoint. None: it was synchronous.
        """
        prefix = "" if saved is None else "replica.0."
        return {
            name if name.startswith(MODEL) else prefix + name: tensor
            for name, tensor in state.items()
        }

    def after_loading(self, saved: SavedReplicas | None) -> None:
        """Called after `tensors_to_load` were loaded."""


# (trainer whose mesh is that of one replica, axis of the replicas) -> outer loop
BuildOuterLoop = Callable[["Trainer", Axis], OuterLoop]

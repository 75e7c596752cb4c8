"""The interface between the trainer and an outer loop, in which replicas train apart for some steps
and are brought together again. `local_sgd` implements it, and you can pass another to `Trainer`."""

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

Tensors = dict[str, Tensor]  # by their names in a checkpoint


class OuterLoop:
    """The trainer of one replica calls these methods, on every rank at once. This class is the
    outer loop of a synchronous run, which does nothing; an outer loop overrides all of it."""

    def combine(self, totals: StepTotals) -> StepTotals:
        """Returns the totals over all replicas, given those of this replica. They stay on the
        device."""
        return totals

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Is called after the optimizer's step, before the model computes with new parameters. With
        `is_last` it is called once more after the step, because the run ends early: the replicas
        must then be equal, as after the last step of the recipe."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Returns a context in which the model computes with the parameters to evaluate."""
        return nullcontext()

    def copies(self) -> list[Copies]:
        """Returns the tensors that must be equal on all replicas."""
        return []

    def begin(self) -> None:
        """Starts from the weights that were loaded into the parameters."""

    def save(self, state: Tensors) -> tuple[Tensors, SavedReplicas | None]:
        """Returns the tensors of a checkpoint, given those of a replica, and the value of
        `Progress.local_sgd`."""
        return state, None

    def tensors_to_load(self, state: Tensors, saved: SavedReplicas | None) -> Tensors:
        """Maps names in a checkpoint to tensors to load them into. A synchronous run reads the
        outer parameters, and all else of the first replica."""
        prefix = "" if saved is None else "replica.0."
        return {
            name if name.startswith(MODEL) else prefix + name: tensor
            for name, tensor in state.items()
        }

    def after_loading(self, saved: SavedReplicas | None) -> None:
        """Continues from the tensors that were loaded."""


# Builds the outer loop of a trainer, whose mesh is that of one replica, over the axis of the
# replicas.
BuildOuterLoop = Callable[["Trainer", Axis], OuterLoop]

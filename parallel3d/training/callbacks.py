"""Callbacks: hooks for user code that watches a run.

Rank 0 calls them outside of all collectives. An exception in a callback does not end the run, and
only the first of each callback is reported. A callback can ask to stop the run. Rank 0 then votes
in the next step's all-reduce, as for SIGTERM, and all ranks stop after that step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from parallel3d.config.import_class import import_class
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.watch.heartbeat import phase

if TYPE_CHECKING:  # Validating a recipe must not import torch.
    from parallel3d.reporting.metrics import StepMetrics
    from parallel3d.training.step_result import StepResult

VALIDATION = "validation"  # Name of the evaluation set that is held out from the training data.


@dataclass
class RunView:
    """State of the run for callbacks to read, and a method to stop the run.

    Args:
        recipe: Recipe of the run.
        run_dir: Folder of the run.
        say: Prints a line without breaking the progress bar.
        step: Number of completed steps.
    """

    recipe: Recipe
    run_dir: Path
    say: Callable[[str], None]
    step: int = 0
    stop_reason: str | None = field(default=None, init=False)  # None: no callback called `stop`.

    def stop(self, reason: str) -> None:
        """Ends the run after its next step, which is treated like the last step of the recipe.

        Args:
            reason: Text for the log. The first reason wins.
        """
        self.stop_reason = self.stop_reason or reason


class Callback:
    """Base class for callbacks. Override the methods that you need.

    Every method receives a `RunView`. Steps count from 1, and `run.step` is the number of completed
    steps. Name your class in `train.callbacks`, for example "my_module:Stop".

    Example:
        >>> class Stop(parallel3d.Callback):
        ...     def evaluated(self, run, losses):
        ...         if losses["validation"] < 1.5:
        ...             run.stop("good enough")
    """

    def __init_subclass__(cls) -> None:
        """Rejects public methods that are not hooks, such as `on_step_end`. Raises ConfigError."""
        super().__init_subclass__()
        known = [name for name in vars(Callback) if not name.startswith("_")]
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and name not in known:
                raise ConfigError(
                    f"callback {cls.__name__}.{name}: no such hook; the hooks are "
                    f"{', '.join(known)}; use one of them, or name a helper _{name}"
                )

    def step_done(self, run: RunView, result: StepResult) -> None:
        """Called after each step, except one that triggers a rollback.

        Args:
            run: State of the run.
            result: Loss, gradient norm, learning rate and other results of the step.
        """

    def evaluated(self, run: RunView, losses: Mapping[str, float]) -> None:
        """Called after each evaluation.

        Args:
            run: State of the run.
            losses: Mean loss of each evaluation set by name, in nats per token. "validation" is the
                set held out from the training data.
        """

    def measured(self, run: RunView, metrics: StepMetrics) -> None:
        """Called with each line that is written to metrics.jsonl.

        Args:
            run: State of the run.
            metrics: Metrics of the last step, with mean times and rates since the previous line.
        """

    def saved(self, run: RunView, checkpoint: Path) -> None:
        """Called when a checkpoint is complete.

        Args:
            run: State of the run.
            checkpoint: Folder of the checkpoint.
        """

    def ended(self, run: RunView, error: BaseException | None) -> None:
        """Called at the end of the run.

        Args:
            run: State of the run.
            error: Exception that ended the run, for example after SIGTERM. None: the run completed
                or was stopped by a callback.
        """


class Callbacks(AbstractContextManager["Callbacks"]):
    """Calls a list of callbacks in order and reports the first exception of each.

    The list is empty on all ranks except 0. Leaving the context calls `ended`.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunView) -> None:
        self._callbacks = callbacks
        self.run = run
        self._told: set[int] = set()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.tell("ended", error)

    def tell(self, hook: str, *seen: object) -> None:
        """Calls the method `hook` of each callback."""
        for index, callback in enumerate(self._callbacks):
            try:
                with phase("callback"):
                    getattr(callback, hook)(self.run, *seen)
            except (Exception, SystemExit) as error:
                if index not in self._told:
                    self._told.add(index)
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    name = f"{type(callback).__module__}:{type(callback).__qualname__}"
                    self.run.say(
                        f"callback {name} failed in {hook} after step {self.run.step}: "
                        f"{type(error).__name__}: {error} ({place.filename}:{place.lineno}); the "
                        "run continues, and later failures of this callback are not reported"
                    )


def callback_classes(recipe: Recipe) -> list[type[Callback]]:
    """Returns the classes named by `train.callbacks`. Raises ConfigError if one is invalid."""
    return [
        import_class("train.callbacks", name, Callback, "parallel3d.Callback")
        for name in recipe.train.callbacks
    ]

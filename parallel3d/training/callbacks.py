"""Callbacks: what a user's own code sees of a run, and the guard through which it is called.

A callback only watches: it is called on rank 0, outside of all collectives. What it raises is
reported once and the run goes on. It may ask to end the run: rank 0 then votes in the sums of the
next step, as for SIGTERM, and all ranks end after that step.
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

if TYPE_CHECKING:  # a wrong recipe is answered without torch
    from parallel3d.reporting.metrics import StepMetrics
    from parallel3d.training.step_result import StepResult

VALIDATION = "validation"  # the evaluation set that is kept back from the run's own data


@dataclass
class RunView:
    """What a callback knows of its run, and the one thing that it can do to it."""

    recipe: Recipe
    run_dir: Path
    say: Callable[[str], None]  # shows a line beside the run's own
    step: int = 0  # steps done
    stop_reason: str | None = field(default=None, init=False)

    def stop(self, reason: str) -> None:
        """Asks to end the run after its next step, which is then evaluated and saved as a last step
        is."""
        self.stop_reason = self.stop_reason or reason


class Callback:
    """Watches a run; override what you need. Steps count from 1, and `run.step` is the last that is
    done.

    Example:
        >>> class Stop(parallel3d.Callback):
        ...     def evaluated(self, run, losses):
        ...         if losses["validation"] < 1.5:
        ...             run.stop("good enough")
    """

    def __init_subclass__(cls) -> None:
        """Refuses a public method that no run calls, such as `on_step_end`."""
        super().__init_subclass__()
        known = [name for name in vars(Callback) if not name.startswith("_")]
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and name not in known:
                raise ConfigError(
                    f"callback {cls.__name__}.{name}: a run does not call this method; it calls "
                    f"{', '.join(known)}; try one of them, or _{name} for a helper"
                )

    def step_done(self, run: RunView, result: StepResult) -> None:
        """Is called after each step."""

    def evaluated(self, run: RunView, losses: Mapping[str, float]) -> None:
        """Is called after each evaluation, with the loss of each set by its name."""

    def measured(self, run: RunView, metrics: StepMetrics) -> None:
        """Is called with each line of metrics.jsonl."""

    def saved(self, run: RunView, checkpoint: Path) -> None:
        """Is called when a checkpoint is whole."""

    def ended(self, run: RunView, error: BaseException | None) -> None:
        """Is called after the last step; `error` is what has ended the run before it, such as
        SIGTERM."""


class Callbacks(AbstractContextManager["Callbacks"]):
    """Calls callbacks in their order, and reports the first exception of each. Only rank 0 has any.
    At the end of its context it tells them how the run has ended."""

    def __init__(self, callbacks: Sequence[Callback], run: RunView) -> None:
        self._callbacks = callbacks
        self.run = run
        self._told: set[int] = set()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.tell("ended", error)

    def tell(self, hook: str, *seen: object) -> None:
        """Calls the method `hook` of each callback with what it sees."""
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
                        f"callback {name} has failed in {hook} after step {self.run.step}: "
                        f"{type(error).__name__}: {error} ({place.filename}:{place.lineno}); the "
                        "run goes on, and further failures are not told"
                    )


def callback_classes(recipe: Recipe) -> list[type[Callback]]:
    """Returns the classes that `train.callbacks` names. Raises ConfigError."""
    return [
        import_class("train.callbacks", name, Callback, "parallel3d.Callback")
        for name in recipe.train.callbacks
    ]

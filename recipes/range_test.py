"""The learning-rate range test (Smith 2017, arXiv 1506.01186).

It is a short run in which every step multiplies the learning rate by the same factor, and which
ends when the loss rises. It consists of a learning-rate schedule and a callback, so it works with
any layout and launcher."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.training.callbacks import Callback, RunView

if TYPE_CHECKING:  # --help does not need torch
    from parallel3d.training.step_result import StepResult

RESULT_FILE = "range_test.json"
_MEMORY = 0.9  # decay rate of the smoothed loss
_DIVERGED = 1.3  # the test ends if the smoothed loss exceeds its minimum by this factor
# Ratio of the learning rate with the lowest smoothed loss to the suggested one.
_BELOW_LOWEST = 10.0
_MOST_ROWS = 25
_SETTINGS = """
optimizer.schedule=range_test
optimizer.lr=1.0
optimizer.min_lr_ratio=1e-6
optimizer.warmup_steps=0
optimizer.decay_start=null
optimizer.decay_shape=null
optimizer.decay_steps=null
train.steps=100
train.batch_warmup_start=null
train.batch_warmup_increment=null
train.batch_warmup_steps=null
train.eval_every=null
train.sample_tokens=0
data.evaluation=[]
train.callbacks=[parallel3d.recipes.range_test:RateRangeTest]
checkpoint.every=null
checkpoint.resume=none
logging.timeline=null
logging.sinks=[]
logging.profile_steps=null
"""


def range_test_settings(recipe: str) -> list[str]:
    """Returns the overrides that turn a recipe into a range test. The user's own overrides come
    later and take precedence."""
    return [*_SETTINGS.split(), f"run_dir=runs/{Path(recipe).stem}-range-test"]


class RateRangeTest(Callback):
    """Records the loss at each learning rate, stops the run when the loss has risen, and prints and
    writes the result."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._losses: list[float] = []
        self._smoothed: list[float] = []

    def step_done(self, run: RunView, result: StepResult) -> None:
        self._rates.append(result.lr)
        self._losses.append(result.loss)
        self._smoothed = smoothed(self._losses)
        if self._smoothed[-1] > _DIVERGED * min(self._smoothed):
            run.stop(f"the loss has risen at a learning rate of {result.lr:.2e}")

    def ended(self, run: RunView, error: BaseException | None) -> None:
        if not self._rates:
            return
        lowest = min(range(len(self._smoothed)), key=self._smoothed.__getitem__)
        is_open = lowest == len(self._smoothed) - 1  # the loss was still falling
        suggested = None if is_open or lowest == 0 else self._rates[lowest] / _BELOW_LOWEST
        rows = zip(self._rates, self._losses, self._smoothed, strict=True)
        found = {
            "suggested_lr": suggested,
            "lowest_loss_lr": self._rates[lowest],
            "steps": [
                {"lr": rate, "loss": loss, "smoothed_loss": smooth} for rate, loss, smooth in rows
            ],
        }
        path = run.run_dir / RESULT_FILE
        path.write_text(json.dumps(found, indent=1) + "\n")
        print("        lr      loss  smoothed")
        every = math.ceil(len(self._rates) / _MOST_ROWS)
        for index in sorted({*range(0, len(self._rates), every), lowest}):
            mark = "  lowest" if index == lowest else ""
            print(
                f"{self._rates[index]:10.2e}{self._losses[index]:10.4f}{self._smoothed[index]:10.4f}{mark}"
            )
        if suggested is None:
            tries = "a higher optimizer.lr" if is_open else "a lower optimizer.lr"
            print(f"no suggestion: the loss is lowest at the end of the range; try {tries}")
        else:
            print(
                f"suggested: optimizer.lr={suggested:.1e}, a tenth of the learning rate with the "
                f"lowest loss; {path}"
            )


def smoothed(losses: Iterable[float]) -> list[float]:
    """Returns the exponential moving average after each loss, with bias correction."""
    mean, means = 0.0, []
    for count, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1.0 - _MEMORY) * loss
        means.append(mean / (1.0 - _MEMORY**count))
    return means

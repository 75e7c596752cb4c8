"""Callbacks: they see a run and change nothing in it, whatever they raise; early stopping; the rate
range test."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    Recipe,
)
from parallel3d.errors import ConfigError
from parallel3d.models.llama import Llama
from parallel3d.recipes.range_test import RateRangeTest, smoothed
from parallel3d.reporting.metrics import StepMetrics
from parallel3d.training.callbacks import (
    Callback,
    RunView,
    callback_classes,
)
from parallel3d.training.step_result import StepResult
from parallel3d.training.worker import run_worker
from tests.one_rank import SMALL, one_rank, read_metrics

MODEL = SMALL.model
TRAIN = replace(SMALL.train, steps=5, eval_every=2, eval_sequences=2)


class Witness(Callback):
    """Notes what it is told, and how a run has ended."""

    told: list[tuple[str, int, object]]

    def __init__(self) -> None:
        self.told = []

    def step_done(self, run: RunView, result: StepResult) -> None:
        self.told.append(("step", run.step, result.loss))

    def evaluated(self, run: RunView, losses: Mapping[str, float]) -> None:
        self.told.append(("evaluated", run.step, tuple(losses)))

    def measured(self, run: RunView, metrics: StepMetrics) -> None:
        self.told.append(("measured", run.step, metrics.step))

    def saved(self, run: RunView, checkpoint: Path) -> None:
        self.told.append(("saved", run.step, checkpoint.name))

    def ended(self, run: RunView, error: BaseException | None) -> None:
        self.told.append(("ended", run.step, error))


class Broken(Callback):
    """Raises whatever happens."""

    def _raise(self, *seen: object) -> None:
        raise SystemExit("a user's slip")

    step_done = evaluated = measured = saved = ended = _raise


def run(folder: Path, *callbacks: Callback, **train: object) -> list[dict[str, float]]:
    """Runs a worker in this process; returns the lines of its metrics."""
    text = folder / "corpus.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    recipe = Recipe(
        model=MODEL,
        train=replace(TRAIN, **train),  # type: ignore[arg-type]
        data=DataConfig(
            source="text",
            path=str(text),
            validation_fraction=0.2,
            evaluation=(EvaluationConfig(name="dickens", path=str(text), sequences=5),),
        ),
        checkpoint=CheckpointConfig(every=4),
        optimizer=OptimizerConfig(lr=1e-2),
        run_dir=str(folder / "run"),
    )
    run_worker(recipe, one_rank(folder), Llama, lambda name, precision: None, callbacks)
    return read_metrics(folder / "run")


def numbers(lines: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["val_loss"]) for line in lines]


def test_callbacks_see_a_run_and_change_nothing_even_if_they_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("without", "watched"):
        (tmp_path / name).mkdir()
    without = run(tmp_path / "without")
    capsys.readouterr()
    witness = Witness()
    watched = run(tmp_path / "watched", Broken(), witness)
    assert numbers(watched) == numbers(without)
    assert [(what, step) for what, step, _ in witness.told] == [
        *[("step", 1), ("measured", 1)],
        *[("step", 2), ("evaluated", 2), ("measured", 2)],
        ("step", 3),
        *[("step", 4), ("evaluated", 4), ("measured", 4), ("saved", 4)],
        *[("step", 5), ("evaluated", 5), ("measured", 5), ("saved", 5)],
        ("ended", 5),
    ]
    assert witness.told[0][2] == without[0]["loss"]
    assert witness.told[-1][2] is None
    assert witness.told[3][2] == ("validation", "dickens")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "callback" in line]
    assert "tests.test_callbacks:Broken failed in step_done after step 1: SystemExit" in line
    assert "test_callbacks.py:" in line


def test_a_class_is_found_in_the_working_directory_and_no_other_class_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_watcher.py").write_text(
        "import parallel3d\nclass Watch(parallel3d.Callback): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = Recipe(model=MODEL, train=replace(TRAIN, callbacks=("my_own_watcher:Watch",)))
    assert [issubclass(found, Callback) for found in callback_classes(own)] == [True]
    other = Recipe(model=MODEL, train=replace(TRAIN, callbacks=("pathlib:Path",)))
    with pytest.raises(
        ConfigError, match=r"train.callbacks = pathlib:Path: Path is not a parallel3d"
    ):
        callback_classes(other)


def test_a_range_test_ends_where_the_loss_rises_and_suggests_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls to 2 until the rate is 1e-2, and then doubles in each step."""
    view = RunView(Recipe(model=MODEL, train=TRAIN), tmp_path, print)
    watcher = RateRangeTest()
    losses = [6.0 - step / 5 for step in range(21)] + [4.0, 8.0, 16.0, 32.0]
    for step, loss in enumerate(losses):
        watcher.step_done(view, SimpleNamespace(lr=10 ** (-6 + step / 5), loss=loss))  # type: ignore[arg-type]
        means = smoothed(losses[: step + 1])
        assert (view.stop_reason is not None) == (means[-1] > 1.3 * min(means))
    assert view.stop_reason is not None
    watcher.ended(view, None)
    found = json.loads((tmp_path / "range_test.json").read_text())
    assert found["lowest_loss_lr"] == pytest.approx(1e-2)
    assert found["suggested_lr"] == pytest.approx(1e-3)
    assert [step["loss"] for step in found["steps"]] == losses
    assert "suggested: optimizer.lr=1.0e-03" in capsys.readouterr().out
    falling = RateRangeTest()
    for step in range(10):
        falling.step_done(view, SimpleNamespace(lr=10.0 ** (-6 + step), loss=6.0 - step))  # type: ignore[arg-type]
    falling.ended(view, None)
    assert json.loads((tmp_path / "range_test.json").read_text())["suggested_lr"] is None
    assert "try a higher optimizer.lr" in capsys.readouterr().out

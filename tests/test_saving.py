"""A run and its folder: what it keeps, where it goes on, and what it says when it cannot write."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel3d import Callback
from parallel3d.checkpoint import saver
from parallel3d.checkpoint.files import PlannedSave
from parallel3d.config.recipe import (
    CheckpointConfig,
    Recipe,
)
from parallel3d.errors import SaveError
from parallel3d.models.llama import Llama
from parallel3d.training.callbacks import RunView
from parallel3d.training.step_result import StepResult
from parallel3d.training.worker import run_worker
from tests.one_rank import SMALL, one_rank

RECIPE = replace(SMALL, checkpoint=CheckpointConfig(every=1, keep=2))


class After(Callback):
    """Does something to the run's folder after a step."""

    def __init__(self, step: int, act: Callable[[Path], object]) -> None:
        self._step = step
        self._act = act

    def step_done(self, run: RunView, result: StepResult) -> None:
        if run.step == self._step:
            self._act(run.run_dir)


class Listening(Callback):
    """Notes the checkpoints that it is told of, and whether they were there."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    def saved(self, run: RunView, checkpoint: Path) -> None:
        self.told.append((checkpoint.name, checkpoint.is_dir()))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., list[tuple[str, bool]]]]:
    """Runs a worker in this process, in tmp_path/run, and returns what its callback was told of
    checkpoints."""

    def run(
        recipe: Recipe = RECIPE, *callbacks: Callback, folder: Path = tmp_path
    ) -> list[tuple[str, bool]]:
        leave_the_group()
        listening = Listening()
        run_worker(
            replace(recipe, run_dir=str(folder / "run")),
            one_rank(tmp_path),
            Llama,
            lambda name, precision: None,
            [*callbacks, listening],
        )
        return listening.told

    yield run
    leave_the_group()


def leave_the_group() -> None:
    """Closes what a worker leaves open after an error, when its process ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def resumed_from(path: Path | str, steps: int) -> Recipe:
    return replace(
        RECIPE,
        train=replace(RECIPE.train, steps=steps),
        checkpoint=replace(RECIPE.checkpoint, resume=str(path)),
    )


def test_a_run_that_goes_on_from_an_older_checkpoint_keeps_what_it_saves(
    run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    assert saved_in(tmp_path) == ["step_00000003", "step_00000004"]
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoints / "step_00000003", checkpoints / "step_00000001")
    (checkpoints / "step_00000300").mkdir()  # empty: no checkpoint
    told = run(resumed_from(checkpoints / "step_00000003", steps=5))
    assert told == [("step_00000004", True), ("step_00000005", True)]
    assert saved_in(tmp_path) == [
        "step_00000004",
        "step_00000004.abandoned",
        "step_00000005",
        "step_00000300",
    ]
    assert f"set aside: {checkpoints}/step_00000004.abandoned" in capsys.readouterr().err
    run(resumed_from("auto", steps=6))
    assert "resumed at step 5" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_renamed_and_counts_for_nothing(
    run: Callable, tmp_path: Path
) -> None:
    run()
    newest = tmp_path / "run" / "checkpoints" / "step_00000004"
    with next(newest.glob("*.distcp")).open("r+b") as shard:
        shard.truncate(100)
    assert run(resumed_from("auto", steps=5)) == [("step_00000004", True), ("step_00000005", True)]
    assert saved_in(tmp_path) == ["step_00000004", "step_00000004.damaged", "step_00000005"]


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    # what happens after step 2, the file that cannot be written
    "moved": (lambda run_dir: run_dir.rename(run_dir.with_name("elsewhere")), "metrics.jsonl"),
    "checkpoints are a file": (lambda run_dir: make_a_file(run_dir / "checkpoints"), "step_"),
}


def make_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_written_ends_the_run_with_its_path(
    run: Callable, tmp_path: Path, fault: str
) -> None:
    act, file = FAULTS[fault]
    with pytest.raises(SaveError) as error:
        run(RECIPE, After(2, act))
    assert error.value.exit_status == 73
    assert str(tmp_path / "run") in str(error.value)
    assert file in str(error.value)
    assert "cannot be written: " in str(error.value)
    # nothing is made there anew
    assert not (tmp_path / "elsewhere").exists() or not (tmp_path / "run").exists()


BACKGROUND = replace(RECIPE, checkpoint=CheckpointConfig(every=2, keep=9, in_background=True))
WAITS_S = 60.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds every save in the background back until it is set."""
    opened = threading.Event()
    write = saver.write_and_commit

    def held_back(*args: Any) -> None:
        assert opened.wait(WAITS_S), "training waits for the save"
        write(*args)

    monkeypatch.setattr(saver, "write_and_commit", held_back)
    return opened


def lines_of(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def test_a_run_trains_on_while_a_checkpoint_is_written(
    run: Callable, gate: threading.Event, tmp_path: Path
) -> None:
    """The save of step 2 is held back until step 3 is done: a run that waited for it would never
    get there."""
    told_before: list[object] = []
    note = After(
        3,
        lambda run_dir: (told_before.extend(run_dir.glob("checkpoints/step_00000002")), gate.set()),
    )
    assert run(BACKGROUND, note) == [("step_00000002", True), ("step_00000004", True)]
    assert told_before == []
    assert saved_in(tmp_path) == ["step_00000002", "step_00000004"]
    (tmp_path / "second").mkdir()
    run(replace(BACKGROUND, checkpoint=CheckpointConfig()), folder=tmp_path / "second")
    assert lines_of(tmp_path) == lines_of(tmp_path / "second")  # the same to the bit
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    run(resumed_from("auto", steps=4))  # the copy of step 2 has nothing of step 3
    assert lines_of(tmp_path) == lines_of(tmp_path / "second")


FAILING = {
    "in the background": replace(BACKGROUND.checkpoint, every=1),
    "at once": replace(RECIPE.checkpoint, keep=9),
}


def disk_full_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    write = saver.write_and_commit

    def full(save: PlannedSave, group: object) -> None:
        if save.progress.step in steps:
            raise SaveError(f"{save.path}: cannot be written: No space left on device")
        write(save, group)  # type: ignore[arg-type]

    monkeypatch.setattr(saver, "write_and_commit", full)


@pytest.mark.parametrize("way", FAILING)
def test_a_save_that_fails_ends_the_run(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    disk_full_at(monkeypatch, 2)
    with pytest.raises(SaveError, match=r"step_00000002: cannot be written: No space left"):
        run(replace(RECIPE, train=replace(RECIPE.train, steps=9), checkpoint=FAILING[way]))
    assert saved_in(tmp_path)[0] == "step_00000001"
    assert "step_00000002" not in saved_in(tmp_path)
    assert lines_of(tmp_path)[-1][0] <= 4  # the ranks agree in a step that follows


@pytest.mark.parametrize("way", FAILING)
def test_a_run_that_is_to_warn_trains_on_and_saves_again(
    run: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
) -> None:
    disk_full_at(monkeypatch, 2, 3)
    recipe = replace(RECIPE, checkpoint=replace(FAILING[way], on_error="warn"))
    assert run(recipe) == [("step_00000001", True), ("step_00000004", True)]
    said = capsys.readouterr().err
    assert "not saved: " in said
    assert "step_00000003: cannot be written: No space left on device; the run continues" in said
    disk_full_at(monkeypatch, 5)
    again = replace(
        resumed_from("auto", steps=5),
        checkpoint=replace(recipe.checkpoint, resume="auto"),
    )
    # the last one: nothing comes after it
    with pytest.raises(SaveError, match="step_00000005: cannot be written"):
        run(again)

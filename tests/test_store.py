"""The folder of checkpoints: the newest whole one is found, old ones go, half of one never has the
name of a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel3d.checkpoint.manifest import (
    FORMAT,
    MANIFEST_FILE,
    Manifest,
    read_manifest,
)
from parallel3d.checkpoint.store import (
    after_resume,
    checkpoint_path,
    commit,
    find_checkpoints,
    list_checkpoints,
    retain,
    step_of,
    superfluous,
    tidy,
)
from parallel3d.config.recipe import CheckpointConfig
from tests.report_runs import PROGRESS


def make(folder: Path, step: int, save: int = 1, val_loss: float | None = None) -> Path:
    """Saves a step; `save` tells the first save of it from the second."""
    final = checkpoint_path(folder, step)
    partial = folder / f"{final.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        (partial / f"shard_{shard}").write_text(f"{step} {save}")
    progress = replace(PROGRESS, step=step, tokens=save, val_loss=val_loss)
    Manifest(FORMAT, "0", "0", progress, {}, {}).write(partial)
    commit(partial, final)
    return final


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(folder)]


def test_checkpoints_are_listed_by_step_not_by_name(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in (20, 100_000_000, 3)]
    assert list_checkpoints(tmp_path) == [made[2], made[0], made[1]]
    assert find_checkpoints("auto", tmp_path) == [made[1], made[0], made[2]]
    assert find_checkpoints("none", tmp_path) == []
    assert find_checkpoints(str(made[0]), tmp_path) == [made[0]]


LOSSES: dict[int, float | None] = {
    10: 3.0,
    20: 1.0,
    30: None,
    40: 2.0,
    50: 1.0,
    60: 4.0,
    70: None,
}


@pytest.mark.parametrize(
    "rule, kept",
    [
        (CheckpointConfig(keep=2), [60, 70]),
        (CheckpointConfig(keep=1, keep_every=30), [30, 60, 70]),
        (CheckpointConfig(keep=1, keep_best=1), [50, 70]),  # the later one of equal losses
        (CheckpointConfig(keep=1, keep_best=9), [10, 20, 40, 50, 60, 70]),  # 30 has no loss
        (CheckpointConfig(keep=2, keep_every=40, keep_best=1), [40, 50, 60, 70]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_a_rule_keeps_the_newest_the_multiples_and_the_best(
    rule: CheckpointConfig, kept: list[int]
) -> None:
    gone = superfluous(LOSSES, rule, 70)
    assert [step for step in LOSSES if step not in gone] == kept


def test_the_best_are_kept_by_the_losses_in_the_checkpoints(tmp_path: Path) -> None:
    for step, loss in enumerate((5.0, 2.0, None, 3.0, 4.0), 1):
        retain(tmp_path, CheckpointConfig(keep=1, keep_best=2), make(tmp_path, step, val_loss=loss))
    assert steps(tmp_path) == [2, 4, 5]
    # cannot be read: it has no loss to be kept for
    (tmp_path / "step_00000002" / MANIFEST_FILE).write_text("{")
    retain(tmp_path, CheckpointConfig(keep=1, keep_best=1), tmp_path / "step_00000005")
    assert steps(tmp_path) == [4, 5]


def test_going_on_from_an_older_checkpoint_sets_the_newer_and_the_damaged_ones_aside(
    tmp_path: Path,
) -> None:
    made = {step: make(tmp_path, step) for step in (1, 2, 3, 4)}
    told = after_resume(tmp_path, 2, made[2], damaged=[made[4]])
    assert names(tmp_path) == [
        "step_00000001",
        "step_00000002",
        "step_00000003.abandoned",
        "step_00000004.damaged",
    ]
    assert told == [
        f"resumed at step 2; set aside: {tmp_path}/step_00000004.damaged",
        f"resumed at step 2; set aside: {tmp_path}/step_00000003.abandoned",
    ]
    assert after_resume(tmp_path, 2, made[2], damaged=[]) == []
    # the abandoned one does not count as newer
    retain(tmp_path, CheckpointConfig(keep=1), make(tmp_path, 3, save=2))
    assert steps(tmp_path) == [3]
    # again: the later one stays
    after_resume(tmp_path, 2, tmp_path / "step_00000003.abandoned", damaged=[])
    assert (tmp_path / "step_00000003.abandoned" / "shard_0").read_text() == "3 2"


def test_a_checkpoint_without_its_manifest_is_tried_and_does_not_count(tmp_path: Path) -> None:
    older = make(tmp_path, 1)
    newer = make(tmp_path, 2)
    (newer / MANIFEST_FILE).unlink()
    assert list_checkpoints(tmp_path) == [older]
    # the resume says what is wrong with it
    assert find_checkpoints("auto", tmp_path) == [newer, older]


class Killed(BaseException):
    """Stands for SIGKILL: nothing but a test catches it."""


OPERATIONS = ("mkdir", "rename", "unlink", "rmdir", "fsync")


class Disk:
    """Counts what changes the file system, and kills the process before one of these operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None  # operations before the kill; None: no kill
        self.count = 0
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, partial(self._operate, getattr(os, name)))

    def _operate(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.left == 0:
            raise Killed
        self.count += 1
        self.left = None if self.left is None else self.left - 1
        return operation(*args, **kwargs)

    def is_killed(self, after: int, action: Callable[[], None]) -> bool:
        """Runs an action, and kills it after this many operations; returns whether it was."""
        self.left = after
        try:
            action()
        except Killed:
            return True
        finally:
            self.left = None
        return False


def save_and_retain(folder: Path, saved: dict[int, int]) -> None:
    """Saves three steps, the last one twice, and notes the number of each save when it is in place.
    Keeps the newest and the multiples of 10, after each save."""
    for step, save in ((10, 1), (11, 1), (12, 1), (12, 2)):
        path = make(folder, step, save)
        saved[step] = save
        retain(folder, CheckpointConfig(keep=1, keep_every=10), path)


def check_whole(folder: Path, saved: dict[int, int]) -> None:
    """Whatever has a checkpoint's name is whole and of one save. What was saved is there, or its
    successor."""
    found = {}
    for path in list_checkpoints(folder):
        step = step_of(path)
        found[step] = read_manifest(path).progress.tokens
        assert names(path) == [MANIFEST_FILE, "shard_0", "shard_1"]
        assert {(path / f"shard_{shard}").read_text() for shard in range(2)} == {
            f"{step} {found[step]}"
        }
    if saved:
        assert max(found) >= max(saved)
        assert found[max(found)] >= saved.get(max(found), 1)
    if 10 in saved:
        assert found[10] == 1


def test_a_kill_at_any_moment_loses_nothing_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at every operation of saving, replacing and retention, and at every one of
    the next tidying."""
    disk = Disk(monkeypatch)
    kills = 0
    while True:
        folder = tmp_path / f"kill_{kills}"
        saved = dict[int, int]()
        folder.mkdir()
        if not disk.is_killed(kills, lambda: save_and_retain(folder, saved)):  # noqa: B023
            break
        kills += 1
        check_whole(folder, {})
        again = 0
        while disk.is_killed(again, lambda: tidy(folder)):  # noqa: B023
            again += 1
        tidy(folder)
        check_whole(folder, saved)
        # nothing half done is left
        assert names(folder) == [path.name for path in list_checkpoints(folder)]
        make(folder, 13)
        assert max(steps(folder)) == 13
    assert kills > 20
    assert steps(folder) == [10, 12]


def test_what_a_crash_left_is_tidied_and_never_counted(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for name in (
        "step_00000002.partial",
        "step_00000001.dropped",
        "step_00000003.replaced.dropped",
    ):
        (tmp_path / name).mkdir()
    # its successor never got its name
    make(tmp_path, 4).rename(tmp_path / "step_00000004.replaced")
    make(tmp_path, 5).rename(tmp_path / "step_00000005.replaced")
    make(tmp_path, 5, save=2)
    (tmp_path / "notes").mkdir()
    assert steps(tmp_path) == [1, 5]
    tidy(tmp_path)
    assert names(tmp_path) == ["notes", "step_00000001", "step_00000004", "step_00000005"]
    assert read_manifest(tmp_path / "step_00000005").progress.tokens == 2

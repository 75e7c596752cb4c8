"""The folder of checkpoints: the newest whole one is found, old ones go, half of one never has the name of a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.checkpoint.manifest import FORMAT, MANIFEST_FILE, Manifest, SavedProgress
from parallel3d.checkpoint.store import (
    checkpoint_path,
    commit,
    find_checkpoints,
    keep_newest,
    list_checkpoints,
    sweep,
)
from parallel3d.errors import ConfigError

PROGRESS = SavedProgress(step=1, tokens=2, seed=3, global_batch_size=4, seq_len=5, parameters=6, parallel={"tp": 2})


def make(folder: Path, step: int) -> Path:
    partial = folder / f"{checkpoint_path(folder, step).name}.partial"
    partial.mkdir(parents=True)
    Manifest(FORMAT, "0", "0", PROGRESS, {}, {}).write(partial)
    commit(partial, checkpoint_path(folder, step))
    return checkpoint_path(folder, step)


def test_checkpoints_are_listed_by_step_not_by_name(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in (20, 100_000_000, 3)]
    assert list_checkpoints(tmp_path) == [made[2], made[0], made[1]]
    assert find_checkpoints("auto", tmp_path) == [made[1], made[0], made[2]]
    assert find_checkpoints("none", tmp_path) == []
    assert find_checkpoints(str(made[0]), tmp_path) == [made[0]]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert find_checkpoints("auto", tmp_path / "absent") == []


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.resume = .*: is no checkpoint; try auto"):
        find_checkpoints(str(tmp_path), tmp_path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in range(5)]
    keep_newest(tmp_path, 2)
    assert list_checkpoints(tmp_path) == made[3:]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    (make(tmp_path, 7) / "old").touch()
    make(tmp_path, 7)
    assert [p.name for p in checkpoint_path(tmp_path, 7).iterdir()] == [MANIFEST_FILE]


def test_what_a_crash_left_is_swept_and_never_counted(tmp_path: Path) -> None:
    whole = make(tmp_path, 1)
    for name in ("step_00000002.partial", "step_00000001.dropped"):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == [whole]
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]

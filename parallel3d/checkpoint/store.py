"""The folder of a run's checkpoints: listing them, putting one in place, dropping old ones. No torch here.

A checkpoint is written into `step_00000100.partial` and renamed to `step_00000100` when it is whole, so that a
folder with a checkpoint's name is always a whole checkpoint. A dropped checkpoint is renamed before it is deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallel3d.errors import CheckpointError, ConfigError

PROGRESS_FILE = "progress.json"
_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = re.compile(r"step_\d{8,}\.(partial|dropped)")


@dataclass(frozen=True, kw_only=True)
class SavedProgress:
    """The progress of a run, which a checkpoint holds beside tensors."""

    step: int
    tokens: int  # labels seen
    seed: int
    global_batch_size: int
    seq_len: int
    parameters: int  # in the whole model
    parallel: dict[str, Any]  # the layout that wrote the checkpoint, for people; reading does not need it
    sequences: int | None = None  # sequences seen, the place in the data; None: step * global_batch_size
    skipped_steps: int = 0  # steps that the loss scaler has skipped
    loss_scale: float | None = None  # the scale of the next step; None: not trained in float16
    loss_scale_good_steps: int = 0  # finite steps in a row at that scale
    optimizer: str = "adamw"  # the optimizer whose states the checkpoint has
    local_sgd: dict[str, Any] | None = None  # replicas that train apart (training/local_sgd/state.py)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the whole checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoints(resume: str, folder: Path) -> list[Path]:
    """Returns the checkpoints that `checkpoint.resume` means, in the order to try: none of them, those of `folder` from
    the newest for `auto`, or the one at a path."""
    if resume == "none":
        return []
    if resume == "auto":
        return list_checkpoints(folder)[::-1]
    if not (Path(resume) / PROGRESS_FILE).is_file():
        raise ConfigError(
            f"checkpoint.resume = {resume}: is no checkpoint; try auto, none or a .../step_00000100 folder"
        )
    return [Path(resume)]


def write_progress(path: Path, progress: SavedProgress) -> None:
    with (path / PROGRESS_FILE).open("w") as file:
        json.dump(asdict(progress), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_progress(path: Path) -> SavedProgress:
    try:
        return SavedProgress(**json.loads((path / PROGRESS_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path / PROGRESS_FILE}: cannot be read: {error}") from error


def commit(partial: Path, final: Path) -> None:
    """Puts a written checkpoint in place, replacing one of the same step."""
    if final.exists():
        drop(final)
    partial.rename(final)
    _sync(final.parent)


def drop(path: Path) -> None:
    """Deletes a checkpoint, under another name, so that a half-deleted one is not taken for whole."""
    dropped = path.with_name(f"{path.name}.dropped")
    if dropped.exists():
        shutil.rmtree(dropped)
    path.rename(dropped)
    shutil.rmtree(dropped)


def keep_newest(folder: Path, keep: int) -> None:
    for path in list_checkpoints(folder)[:-keep]:
        drop(path)


def sweep(folder: Path) -> None:
    """Deletes the checkpoints that an interrupted run left half written or half deleted."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _UNFINISHED.match(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

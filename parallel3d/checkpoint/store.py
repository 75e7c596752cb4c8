"""The folder of a run's checkpoints: listing them, putting one in place, dropping old ones. No torch here.

A checkpoint is written into `step_00000100.partial` and renamed to `step_00000100` when it is whole, so that a
folder with a checkpoint's name is always a whole checkpoint. A dropped checkpoint is renamed before it is deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from parallel3d.checkpoint.manifest import FORMER_FILE, MANIFEST_FILE
from parallel3d.errors import ConfigError

_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the whole checkpoints of a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoints(resume: str, folder: Path) -> list[Path]:
    """Returns the checkpoints that `checkpoint.resume` means, in the order to try: none of them, those of `folder` from
    the newest for `auto`, or the one at a path."""
    if resume == "none":
        return []
    if resume == "auto":
        return list_checkpoints(folder)[::-1]
    if not is_checkpoint(Path(resume)):
        raise ConfigError(
            f"checkpoint.resume = {resume}: is no checkpoint; try auto, none or a .../step_00000100 folder"
        )
    return [Path(resume)]


def is_checkpoint(path: Path) -> bool:
    """Returns whether a folder has a checkpoint of any format, which its reader may then refuse in better words."""
    return any((path / name).is_file() for name in (MANIFEST_FILE, FORMER_FILE))


def commit(partial: Path, final: Path) -> None:
    """Puts a written checkpoint in place, replacing one of the same step."""
    if final.exists():
        drop(final)
    partial.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
    for path in (*folder.glob("step_[0-9]*.partial"), *folder.glob("step_[0-9]*.dropped")):
        shutil.rmtree(path, ignore_errors=True)

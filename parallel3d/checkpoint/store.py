"""The folder of a run's checkpoints: listing them, putting one in place, dropping old ones, and the checksums of one's
files, without which a flipped bit would load silently (`sha256sum -c checksums.sha256` reads them). No torch here.

A checkpoint is written into `step_00000100.partial` and renamed to `step_00000100` when it is whole, so that a
folder with a checkpoint's name is always a whole checkpoint. A dropped checkpoint is renamed before it is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallel3d.errors import CheckpointError, ConfigError, DamagedCheckpointError

PROGRESS_FILE = "progress.json"
CHECKSUMS = "checksums.sha256"
_NAME = re.compile(r"step_(\d{8,})")
_CHECKSUM = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")  # a line as sha256sum writes it


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
    drawn: dict[str, int] | None = None  # sequences seen of each source of a mixture; None: not known
    skipped_steps: int = 0  # steps that the loss scaler has skipped
    loss_scale: float | None = None  # the scale of the next step; None: not trained in float16
    loss_scale_good_steps: int = 0  # finite steps in a row at that scale
    optimizer: str = "adamw"  # the optimizer whose states the checkpoint has
    local_sgd: dict[str, Any] | None = None  # replicas that train apart (training/local_sgd/state.py)


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
    if not (Path(resume) / PROGRESS_FILE).is_file():
        raise ConfigError(
            f"checkpoint.resume = {resume}: is no checkpoint; try auto, none or a .../step_00000100 folder"
        )
    return [Path(resume)]


def find_start(start_from: str | None) -> list[Path]:
    """Returns the checkpoints that `checkpoint.start_from` means, in the order to try: the one at the path, or those of
    a run's folder from the newest. Raises ConfigError where there is none."""
    if start_from is None:
        return []
    path = Path(start_from)
    if (path / PROGRESS_FILE).is_file():
        return [path]
    if found := (list_checkpoints(path / "checkpoints") or list_checkpoints(path))[::-1]:
        return found
    is_run = (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()
    words = "has no whole checkpoint" if is_run else "is no checkpoint" if path.exists() else "there is no such folder"
    raise ConfigError(
        f"checkpoint.start_from = {start_from}: {words}; try null, the folder of a run that has saved, or a "
        ".../step_00000100 folder"
    )


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


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Writes the SHA-256 of each saved file, by its name."""
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items())]
    (folder / CHECKSUMS).write_text("".join(lines))


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each saved file, by its name. Raises DamagedCheckpointError where the checksums cannot be
    read, and where the folder has other files than they name."""
    path = folder / CHECKSUMS
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error}") from error
    matches = [_CHECKSUM.fullmatch(line) for line in lines]
    found = {match[2]: match[1] for match in matches if match is not None}
    if None in matches or not found:
        raise DamagedCheckpointError(f"{path}: line {matches.index(None) + 1 if matches else 1} is no checksum")
    there = {file.name for file in folder.iterdir()} - {CHECKSUMS}
    if missing := sorted(found.keys() - there):
        raise DamagedCheckpointError(f"{folder / missing[0]}: is missing, and was saved")
    if extra := sorted(there - found.keys()):
        raise DamagedCheckpointError(f"{folder / extra[0]}: is no file of this checkpoint; remove it")
    return found

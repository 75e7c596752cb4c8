"""`parallel3d-checkpoint ls`, `inspect` and `verify`: lists the checkpoints of a run, describes
one, and checks every byte. They neither import torch nor change files.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from parallel3d.checkpoint.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    by_block,
    find_damage,
    missing_files,
    read_manifest,
)
from parallel3d.checkpoint.store import (
    is_checkpoint,
    list_checkpoints,
    size_text,
    step_folders,
    step_of,
)
from parallel3d.config.yaml_text import read_settings, shown
from parallel3d.errors import CheckpointError, ConfigError, DamagedCheckpointError
from parallel3d.tools.cli_output import Reply

# Maximum number of tensors to print per damaged file. The JSON output lists all.
_SHOWN_TENSORS = 10
# Name of a checkpoint, or of a folder that was set aside.
_STEP = re.compile(r"step_(\d{8,})(?:\.(partial|replaced|dropped|damaged|abandoned))?")


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """A row of `ls`: a checkpoint, or the folder of an incomplete or replaced one."""

    step: int
    path: str
    bytes: int
    saved: str | None  # Time of the save in ISO 8601. None: the folder has no manifest.
    # "whole", "damaged", "unknown" (cannot be read), or the suffix of the folder.
    state: str = "whole"
    reason: str | None = None  # Reason if the state is "damaged" or "unknown".
    val_loss: float | None = None
    best: bool = False  # True for the lowest validation loss of the run.

    @property
    def line(self) -> str:
        loss = "" if self.val_loss is None else f"{self.val_loss:.4f}"
        saved = (self.saved or "")[:16].replace("T", " ")
        words = [self.state, *["best"] * self.best, *[self.reason or ""]]
        shown = ", ".join(filter(None, words))
        return f"{self.step:>10}{size_text(self.bytes):>12}  {saved:<16}{loss:>10}  {shown}"


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """Returns the checkpoint at a path or the newest one of a run, and a line for each newer but
    incomplete one. Raises ConfigError if there is none."""
    if is_checkpoint(path):
        return path, []
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise _no_checkpoint(path)
    newest = found[-1]
    step = step_of(found[-1])
    newer = [each for each in step_folders(newest.parent) if step_of(each) > step]
    return newest, [f"step {step}: {each} is incomplete (no {MANIFEST_FILE})" for each in newer]


def _no_checkpoint(path: Path) -> ConfigError:
    return ConfigError(
        f"CKPT = {path}: no complete checkpoint found; try a .../step_00000100 folder, or the "
        "folder of a run that has saved"
    )


def answer_list(options: Namespace) -> Reply:
    """Lists the checkpoints of a run with size, time and validation loss. Reads manifests, but not
    tensors. Raises ConfigError if there are none.
    """
    run: Path = options.path
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    rows = []
    for path in folder.glob("step_*"):
        if name := _STEP.fullmatch(path.name):
            rows.append(_listed(path, int(name[1]), name[2]))
    if not rows:
        raise ConfigError(
            f"RUN = {run}: no checkpoints found; try the folder of a run, such as runs/quickstart"
        )
    rows.sort(key=lambda row: (row.step, row.path))
    lowest = min((row.val_loss for row in rows if row.val_loss is not None), default=None)
    rows = [replace(row, best=row.val_loss is not None and row.val_loss == lowest) for row in rows]
    whole = sum(row.state == "whole" for row in rows)
    page = [
        f"{folder}: {whole} of {len(rows)} complete (by file size; `verify` reads every byte)",
        f"{'step':>10}{'size':>12}  {'saved':<16}{'val loss':>10}",
        *(row.line for row in rows),
    ]
    tree = {"run": str(run), "checkpoints": [asdict(row) for row in rows]}
    return Reply(page=page, tree=lambda: tree)


def _listed(path: Path, step: int, ending: str | None) -> CheckpointEntry:
    total = sum(file.stat().st_size for file in path.glob("*") if file.is_file())
    row = CheckpointEntry(step=step, path=str(path), bytes=total, saved=_saved(path))
    if ending is not None:
        return replace(row, state=ending)
    try:
        manifest = read_manifest(path)
        for damage in missing_files(path, manifest):
            raise damage.error(path)
    except CheckpointError as error:
        is_damaged = isinstance(error, DamagedCheckpointError)
        reason = str(error).removeprefix(str(path)).lstrip("/: ")
        return replace(row, state="damaged" if is_damaged else "unknown", reason=reason)
    return replace(row, val_loss=manifest.progress.val_loss)


def answer_inspect(options: Namespace) -> Reply:
    """Describes a checkpoint: its progress, files, tensors and recipe. Raises CheckpointError if
    its manifest cannot be read.
    """
    checkpoint, notes = find_checkpoint(options.path)
    manifest = read_manifest(checkpoint)
    recipe = {setting.key: setting.value for setting in read_settings(checkpoint / CONFIG_FILE)}
    tensors = {
        name: {"dtype": each.dtype, "shape": list(each.shape)}
        for name, each in manifest.tensors.items()
    }
    total = sum(file.bytes for file in manifest.files.values())
    progress = manifest.progress
    tree = {
        "checkpoint": str(checkpoint),
        "notes": notes,
        "saved": _saved(checkpoint),
        "bytes": total,
        "format": manifest.format,
        "parallel3d": manifest.parallel3d,
        "torch": manifest.torch,
        "progress": asdict(progress),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": tensors,
        "recipe": recipe,
    }

    def page() -> Iterator[str]:
        yield from notes
        yield f"{checkpoint}: parallel3d {manifest.parallel3d}, torch {manifest.torch}"
        yield f"  saved {_saved(checkpoint)}, {size_text(total)} in {len(manifest.files)} files"
        yield from (f"  {key}: {value}" for key, value in asdict(progress).items())
        yield f"tensors ({len(tensors):,}):"
        described = ((name, f"{each['dtype']} {each['shape']}") for name, each in tensors.items())
        yield from (f"  {line}" for line in by_block(described))
        yield f"recipe ({CONFIG_FILE}):"
        yield from (f"  {key}: {shown(value)}" for key, value in recipe.items())

    return Reply(page=page(), tree=lambda: tree)


def answer_verify(options: Namespace) -> Reply:
    """Reads every byte of one checkpoint or of all checkpoints of a run, and names damaged files
    and tensors. Raises ConfigError if there is no checkpoint."""
    path: Path = options.path
    chosen = step_folders(path / "checkpoints") or step_folders(path)
    if _STEP.fullmatch(path.name):
        chosen = [path]
    if not path.is_dir() or not chosen:
        raise _no_checkpoint(path)
    found = {checkpoint: [*find_damage(checkpoint)] for checkpoint in chosen}

    def page() -> Iterator[str]:
        for checkpoint, damages in found.items():
            words = f"{len(damages)} damaged" if damages else "every byte matches the checksums"
            yield f"{checkpoint}: {words}"
            for damage in damages:
                yield f"  {damage.file}: {damage.reason}"
                yield from (f"    {name}" for name in damage.tensors[:_SHOWN_TENSORS])
                if len(damage.tensors) > _SHOWN_TENSORS:
                    yield f"    and {len(damage.tensors) - _SHOWN_TENSORS} more tensors"

    tree = []
    for each, damages in found.items():
        damage = [asdict(damage) for damage in damages]
        tree.append({"path": str(each), "whole": not damages, "damage": damage})
    status = CheckpointError.exit_status if any(found.values()) else 0
    return Reply(page=page(), tree=lambda: {"checkpoints": tree}, status=status)


def _saved(checkpoint: Path) -> str | None:
    """Returns the modification time of the manifest in ISO 8601, or None if it does not exist."""
    try:
        at = (checkpoint / MANIFEST_FILE).stat().st_mtime
    except OSError:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at))

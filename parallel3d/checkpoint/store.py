"""The folder of a run's checkpoints: listing them, putting one in place, setting others aside,
deleting them; and the weights that a new run begins with, `checkpoint.start_from`: where they are,
and whether they are of its model. No torch.

A checkpoint is written into `step_00000100.partial` and renamed to `step_00000100` when it is
complete. It is renamed again before it is deleted, so an incomplete checkpoint never has the name
of one. The other endings:

step_00000100.replaced    saved again; deleted when its successor is in place, or restored
step_00000100.dropped     is being deleted
step_00000100.damaged     was found damaged; nothing here reads it or counts it again
step_00000100.abandoned   the run resumed from an older checkpoint; as `damaged`
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from parallel3d.checkpoint.manifest import MANIFEST_FILE, read_manifest
from parallel3d.config.hugging_face import from_hugging_face, left_out, read_config_json
from parallel3d.config.recipe import CheckpointConfig, ModelConfig
from parallel3d.config.yaml_text import shown
from parallel3d.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    SaveError,
)
from parallel3d.launch.run_dir import STEP_FOLDERS

_NAME = re.compile(r"step_\d{8,}")
CONFIG_JSON = "config.json"
# The weights depend on these keys of a model; a run may change the second ones.
_SAME = [
    *["architecture", "layers", "hidden", "heads", "key_value_heads", "head_size", "ffn_hidden"],
    *["vocab", "max_positions", "qkv_bias", "qk_norm", "tied_embeddings"],
]
_MAY_DIFFER = ["norm_eps", "rope_theta", "rope_scaling", "window"]
_KEYS = {"key_value_heads": "kv_heads", "head_size": "head_dim"}  # of these properties


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a folder, oldest first."""
    return [path for path in step_folders(folder) if is_checkpoint(path)]


def is_checkpoint(path: Path) -> bool:
    """Tells whether a folder has the file that is written last into a checkpoint."""
    return (path / MANIFEST_FILE).is_file()


def step_folders(folder: Path) -> list[Path]:
    """Returns the folders that have the name of a checkpoint, oldest first, also those that are not
    whole."""
    found = (path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))
    return sorted(found, key=step_of)


def _candidates(folder: Path) -> list[Path]:
    """Returns what has the name of a checkpoint and is not empty, oldest first, so that a resume
    tells what is wrong with one that has lost its manifest."""
    return [path for path in step_folders(folder) if any(path.glob("*"))]


def find_checkpoints(resume: str, folder: Path) -> list[Path]:
    """Returns the checkpoints that `checkpoint.resume` means, in the order to try: none of them,
    those of `folder` from the newest for `auto`, or the one at a path."""
    if resume == "none":
        return []
    if resume == "auto":
        return _candidates(folder)[::-1]
    if not is_checkpoint(Path(resume)):
        raise ConfigError(
            f"checkpoint.resume = {resume}: is no checkpoint; try auto, none or a "
            ".../step_00000100 folder"
        )
    return [Path(resume)]


def find_start(start_from: str | None) -> list[Path]:
    """Returns the checkpoints that `checkpoint.start_from` means, in the order to try: the one at
    the path, those of a run's folder from the newest, or a folder of transformers. Raises
    ConfigError where there is none."""
    if start_from is None:
        return []
    path = Path(start_from)
    if is_checkpoint(path) or is_pretrained(path):
        return [path]
    if found := find_checkpoints("auto", path / "checkpoints") or find_checkpoints("auto", path):
        return found
    raise ConfigError(
        f"checkpoint.start_from = {start_from}: has no whole checkpoint, and no weights as "
        "safetensors (pickles are not read); try null, the folder of a run that has saved, a "
        ".../step_00000100 folder, or one of transformers"
    )


def is_pretrained(path: Path) -> bool:
    """Returns whether a folder has the weights of a model of transformers."""
    return any(path.glob("*.safetensors"))


def check_start(start: Path, model: ModelConfig) -> list[str]:
    """Returns lines for the user on what a model computes otherwise than the weights at `start`
    were made for, as far as their config.json tells. Raises ConfigError where that is another
    model, or none that a recipe can have."""
    path = start / CONFIG_JSON
    if not is_pretrained(start):
        return []
    if not path.is_file():
        return [f"{start}: has no config.json; names and shapes of the weights alone are compared"]
    config = read_config_json(path)
    theirs = from_hugging_face(config, path)
    errors = [*left_out(config, path)]
    notes = list[str]()
    for name in (*_SAME, *_MAY_DIFFER):
        there = shown(getattr(theirs, name))
        here = shown(getattr(model, name))
        if there != here:
            key = f"model.{_KEYS.get(name, name)}"
            words = f"{key} = {here}: the weights of {start} have {there}"
            if name in _MAY_DIFFER:
                notes.append(words)
            else:
                errors.append(f"{words}; try {key}={there}")
    if errors:
        raise ConfigError("\n".join(errors))
    return notes


def check_manifests(checkpoints: Sequence[Path]) -> None:
    """Raises CheckpointError where a run that is to go on from the first whole one of `checkpoints`
    finds none, as far as their manifests tell: the files themselves are compared when they are
    read."""
    for path in checkpoints:
        try:
            read_manifest(path)
            return
        except DamagedCheckpointError:
            if path == checkpoints[-1]:
                raise


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raises SaveError if the disk of `folder` is too full for a checkpoint."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        sizes = f"{size_text(needed_bytes)}, {size_text(free)} are free"
        raise SaveError(f"{folder}: a checkpoint needs {sizes}")


def size_text(count: int) -> str:
    """Returns a number of bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def commit(partial: Path, final: Path) -> None:
    """Puts a written folder in place. One that has its name moves aside before and is deleted
    after, so that `tidy` finds one of the two wherever this is cut off."""
    replaced = _named(final, "replaced")
    if final.exists():
        _delete(replaced)  # an earlier one, whose successor is `final`
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    _delete(replaced)


def take_back(folder: Path) -> None:
    """Gives the checkpoints that were replaced their names again if their successors are not in
    place."""
    for replaced in sorted(folder.glob(f"{STEP_FOLDERS}.replaced")):
        final = replaced.with_suffix("")
        if is_checkpoint(final):
            continue
        if final.exists():
            set_aside(final, "damaged")
        replaced.rename(final)


def tidy(folder: Path) -> None:
    """Cleans up after a crash or a failed save: restores replaced checkpoints that have no
    successor, and deletes the others and those that are half written or half deleted. No save may
    be in progress."""
    take_back(folder)
    for ending in ("replaced", "partial", "dropped"):
        for path in folder.glob(f"{STEP_FOLDERS}.{ending}"):
            shutil.rmtree(path)


def after_resume(folder: Path, step: int, resumed: Path, *, damaged: Sequence[Path]) -> list[str]:
    """Sets aside the `damaged` checkpoints that a resume from `resumed` at `step` has passed over,
    and those that are newer, because a later resume would take them. Returns a line for the user
    about each."""
    aside = [set_aside(path, "damaged") for path in damaged]
    for path in _candidates(folder):
        if step_of(path) >= step and not path.samefile(resumed):
            aside.append(set_aside(path, "abandoned"))
    return [f"the run goes on from step {step}; set aside: {path}" for path in aside]


def set_aside(path: Path, ending: str) -> Path:
    """Renames a checkpoint, so that nothing counts it any more, and returns its new path. One of
    the same step that was set aside earlier is deleted."""
    aside = _named(path, ending)
    _delete(aside)
    path.rename(aside)
    return aside


def retain(folder: Path, rule: CheckpointConfig, saved: Path) -> None:
    """Deletes the checkpoints that the rule does not keep, after `saved` has been put in place."""
    paths = {step_of(path): path for path in list_checkpoints(folder)}
    losses = dict.fromkeys(paths, None)
    if rule.keep_best:
        losses = {step: _val_loss(path) for step, path in paths.items()}
    for step in superfluous(losses, rule, step_of(saved)):
        _delete(paths[step])


def superfluous(
    losses: Mapping[int, float | None], rule: CheckpointConfig, saved: int
) -> list[int]:
    """Returns the steps whose checkpoints go, of those that have `losses`. A step without a
    validation loss is never among the best; of equal losses the later step's is better. The step
    just `saved` always stays."""
    known = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
    kept = {saved, *sorted(losses)[-rule.keep :], *(-step for _, step in known[: rule.keep_best])}
    if rule.keep_every is not None:
        kept |= {step for step in losses if step % rule.keep_every == 0}
    return sorted(losses.keys() - kept)


def _val_loss(path: Path) -> float | None:
    with suppress(CheckpointError):  # a resume reports it
        return read_manifest(path).progress.val_loss
    return None


def _named(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _delete(path: Path) -> None:
    """Deletes a checkpoint, under another name, so that a half-deleted one is not taken for
    whole."""
    dropped = _named(path, "dropped")
    if dropped.exists():
        shutil.rmtree(dropped)
    if path.exists():
        path.rename(dropped)
        sync_folder(path.parent)
        shutil.rmtree(dropped)


def sync_folder(folder: Path) -> None:
    """Has the disk know the names in a folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

"""Lists, commits, sets aside and deletes the checkpoints of a run. Finds those to load.

This module does not import torch.

A checkpoint is written to `step_00000100.partial` and renamed to `step_00000100` when it is
complete. Before it is deleted it is renamed again, so an incomplete checkpoint never has the final
name. Other suffixes:

    step_00000100.replaced    saved again; deleted when its successor is complete, else restored
    step_00000100.dropped     being deleted
    step_00000100.damaged     found damaged; never read again
    step_00000100.abandoned   newer than the checkpoint that a run resumed from; never read again
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import MANIFEST_FILE, read_manifest
from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.hugging_face import (
    config_of,
    from_hugging_face,
    ignored_keys,
    read_config_json,
)
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
# Keys of a config.json that do not change the computation.
_UNRELATED = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
# Keys of the model that are not in a config.json. `experts` are compared one by one.
_OWN = [
    "name",
    "config",
    "options",
    "tp_rules",
    "stages",
    "init_std",
    "dropout",
    "attention_dropout",
    "experts",
]
_COMPARED = [key for key in ModelConfig.__dataclass_fields__ if key not in _OWN]
# Keys that a run may change.
_MAY_DIFFER = ["norm_eps", "rope_theta", "rope_scaling", "window"]
# Router biases start from 0, because files do not have them.
_EXPERTS = [f"experts.{key}" for key in ExpertsConfig.__dataclass_fields__ if key != "bias_rate"]
# Properties of ModelConfig that fill in the default of a key.
_PROPERTIES = {"kv_heads": "key_value_heads", "head_dim": "head_size"}


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a folder, oldest first."""
    return [path for path in step_folders(folder) if is_checkpoint(path)]


def is_checkpoint(path: Path) -> bool:
    """Returns True if a folder has the manifest, which is written last."""
    return (path / MANIFEST_FILE).is_file()


def step_folders(folder: Path) -> list[Path]:
    """Returns the folders that are named like a checkpoint, even incomplete ones, oldest first."""
    found = (path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))
    return sorted(found, key=step_of)


def _candidates(folder: Path) -> list[Path]:
    """Returns the non-empty folders named like a checkpoint, oldest first.

    Those without a manifest are included, so that a resume reports them.
    """
    return [path for path in step_folders(folder) if any(path.glob("*"))]


def find_checkpoints(resume: str, folder: Path) -> list[Path]:
    """Returns the checkpoints to try for `checkpoint.resume`, in order.

    `resume` is "none", "auto" (those in `folder`, even damaged ones, newest first), or the path of
    a checkpoint. Raises ConfigError if the path is not a checkpoint.
    """
    if resume == "none":
        return []
    if resume == "auto":
        return _candidates(folder)[::-1]
    if not is_checkpoint(Path(resume)):
        raise ConfigError(
            f"checkpoint.resume = {resume}: is not a checkpoint; try auto, none or a "
            ".../step_00000100 folder"
        )
    return [Path(resume)]


def find_start(start_from: str | None) -> list[Path]:
    """Returns the checkpoints to try for `checkpoint.start_from`, in order.

    `start_from` can name a checkpoint, the folder of a run or of its checkpoints (newest first), or
    a folder in Hugging Face format. Raises ConfigError if there is nothing to load.
    """
    if start_from is None:
        return []
    path = Path(start_from)
    if is_checkpoint(path) or is_pretrained(path):
        return [path]
    if found := find_checkpoints("auto", path / "checkpoints") or find_checkpoints("auto", path):
        return found
    raise ConfigError(
        f"checkpoint.start_from = {start_from}: has no complete checkpoint and no weights as "
        "safetensors (pickles are not read); try null, the folder of a run with a checkpoint, a "
        ".../step_00000100 folder, or one of transformers"
    )


def is_pretrained(path: Path) -> bool:
    """Returns True if a folder has safetensors files."""
    return any(path.glob("*.safetensors"))


def check_start(start: Path, model: ModelConfig) -> list[str]:
    """Compares a model with the config.json of the Hugging Face weights that it starts from.

    Returns:
        Lines for the user about tolerated differences or a missing config.json. Empty if `start` is
        not in Hugging Face format.

    Raises:
        ConfigError: The weights are from another model, or from one that a recipe cannot describe.
    """
    path = start / CONFIG_JSON
    if not is_pretrained(start):
        return []
    if not path.is_file():
        return [f"{start}: has no config.json; only names and shapes of the weights are compared"]
    config = read_config_json(path)
    if model.architecture == "transformers":
        own = config_of(model)
        differing = [key for key in config if key in own and config[key] != own[key]]
        return [
            f"{path}: {key} = {shown(config[key])}, but this run has {shown(own[key])}"
            for key in differing
            if key not in _UNRELATED
        ]
    theirs = from_hugging_face(config, path)
    errors = [*ignored_keys(config, path)]
    notes = list[str]()
    experts = ["experts"] if theirs.experts is None else _EXPERTS
    for key in (*_COMPARED, *experts):
        there, here = (shown(_value(each, key)) for each in (theirs, model))
        if there != here:
            words = f"model.{key} = {here}: the weights in {start} have {there}"
            if key in _MAY_DIFFER:
                notes.append(words)
            else:
                errors.append(f"{words}; try model.{key}={there}")
    if errors:
        raise ConfigError("\n".join(errors))
    return notes


def _value(model: ModelConfig, name: str) -> Any:
    section, _, key = name.rpartition(".")
    key = _PROPERTIES.get(key, key)
    return getattr(getattr(model, section) if section else model, key, None)


def check_manifests(checkpoints: Sequence[Path]) -> None:
    """Raises CheckpointError if all manifests are damaged or the first intact one is unsupported.

    The other files are checked when they are read.
    """
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
        sizes = f"{size_text(needed_bytes)}, but {size_text(free)} are free"
        raise SaveError(f"{folder}: a checkpoint needs {sizes}")


def size_text(count: int) -> str:
    """Formats a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def commit(partial: Path, final: Path) -> None:
    """Renames a written folder to its final name.

    An existing checkpoint of that name is moved aside first and deleted last. If the process dies
    in between, `tidy` keeps one of the two.
    """
    replaced = _named(final, "replaced")
    if final.exists():
        _delete(replaced)  # Left over from an earlier commit of `final`.
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    _delete(replaced)


def take_back(folder: Path) -> None:
    """Restores replaced checkpoints without a complete successor.

    An incomplete successor is set aside as damaged.
    """
    for replaced in sorted(folder.glob(f"{STEP_FOLDERS}.replaced")):
        final = replaced.with_suffix("")
        if is_checkpoint(final):
            continue
        if final.exists():
            set_aside(final, "damaged")
        replaced.rename(final)


def tidy(folder: Path) -> None:
    """Cleans up after a crash or a failed save.

    Calls `take_back`, then deletes the remaining replaced, partial and dropped folders. Must not
    run during a save.
    """
    take_back(folder)
    for ending in ("replaced", "partial", "dropped"):
        for path in folder.glob(f"{STEP_FOLDERS}.{ending}"):
            shutil.rmtree(path)


def after_resume(folder: Path, step: int, resumed: Path, *, damaged: Sequence[Path]) -> list[str]:
    """Sets aside `damaged` checkpoints and those of `step` or later, except `resumed`.

    A later resume would otherwise pick them. Returns a line for the user for each.
    """
    aside = [set_aside(path, "damaged") for path in damaged]
    for path in _candidates(folder):
        if step_of(path) >= step and not path.samefile(resumed):
            aside.append(set_aside(path, "abandoned"))
    return [f"resumed at step {step}; set aside: {path}" for path in aside]


def set_aside(path: Path, ending: str) -> Path:
    """Renames a checkpoint so that it is ignored, and returns its new path.

    A folder that already has the new name is deleted.
    """
    aside = _named(path, ending)
    _delete(aside)
    path.rename(aside)
    return aside


def retain(folder: Path, rule: CheckpointConfig, saved: Path) -> None:
    """Deletes the checkpoints that `rule` does not keep, except the new one, `saved`."""
    paths = {step_of(path): path for path in list_checkpoints(folder)}
    losses = dict.fromkeys(paths, None)
    if rule.keep_best:
        losses = {step: _val_loss(path) for step, path in paths.items()}
    for step in superfluous(losses, rule, step_of(saved)):
        _delete(paths[step])


def superfluous(
    losses: Mapping[int, float | None], rule: CheckpointConfig, saved: int
) -> list[int]:
    """Returns the steps whose checkpoints can be deleted, given the validation loss of each.

    A step without a validation loss is never among the best. Of equal losses, the later step wins.
    The step just `saved` is always kept.
    """
    known = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
    kept = {saved, *sorted(losses)[-rule.keep :], *(-step for _, step in known[: rule.keep_best])}
    if rule.keep_every is not None:
        kept |= {step for step in losses if step % rule.keep_every == 0}
    return sorted(losses.keys() - kept)


def _val_loss(path: Path) -> float | None:
    with suppress(CheckpointError):  # A resume reports the error.
        return read_manifest(path).progress.val_loss
    return None


def _named(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _delete(path: Path) -> None:
    """Renames a checkpoint before deleting it, so a partly deleted one never looks complete."""
    dropped = _named(path, "dropped")
    if dropped.exists():
        shutil.rmtree(dropped)
    if path.exists():
        path.rename(dropped)
        sync_folder(path.parent)
        shutil.rmtree(dropped)


def sync_folder(folder: Path) -> None:
    """Syncs the directory entries of a folder to disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

"""The weights that a new run begins with, `checkpoint.start_from`: where they are, and whether they
are of its model. No torch here."""

from __future__ import annotations

from pathlib import Path

from parallel3d.checkpoint.store import find_checkpoints, is_checkpoint
from parallel3d.config.hugging_face import from_hugging_face, left_out, read_config_json
from parallel3d.config.recipe import ModelConfig
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError

CONFIG_JSON = "config.json"
# The weights depend on these keys of a model; a run may change the second ones.
_SAME = [
    *["architecture", "layers", "hidden", "heads", "key_value_heads", "head_size", "ffn_hidden"],
    *["vocab", "max_positions", "qkv_bias", "qk_norm", "tied_embeddings"],
]
_MAY_DIFFER = ["norm_eps", "rope_theta", "rope_scaling", "window"]
_KEYS = {"key_value_heads": "kv_heads", "head_size": "head_dim"}  # of these properties


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
    theirs = from_hugging_face(path)
    errors, notes = [*left_out(read_config_json(path), path)], list[str]()
    for name in (*_SAME, *_MAY_DIFFER):
        there, here = shown(getattr(theirs, name)), shown(getattr(model, name))
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

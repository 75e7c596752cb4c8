"""`parallel3d-checkpoint import`: writes a recipe for a run that starts from weights in Hugging
Face format."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.store import CONFIG_JSON, is_pretrained
from parallel3d.config.hugging_face import from_hugging_face, ignored_keys, read_config_json
from parallel3d.config.recipe import ModelConfig
from parallel3d.config.yaml_text import dump_yaml
from parallel3d.errors import ConfigError
from parallel3d.tools.cli_output import Reply, write_output


def answer(options: Namespace) -> Reply:
    """Writes the recipe of a model to a file or prints it.

    Raises ConfigError, with a line per problem, if a recipe cannot represent the model, and
    CheckpointError if the tensors do not match config.json."""
    folder: Path = options.folder
    to: Path | None = options.out
    path = folder / CONFIG_JSON
    if not is_pretrained(folder):
        raise ConfigError(
            f"DIR = {folder}: contains no safetensors (pickle files are not supported); try a "
            "folder with config.json and model.safetensors"
        )
    config = read_config_json(path)
    model = from_hugging_face(config, path)
    problems = [*ignored_keys(config, path)]
    if problems:
        raise ConfigError("\n".join(f"{folder}: {problem}" for problem in problems))
    _check_tensors(folder, model)
    tree: dict[str, Any] = {"model": _changed_keys(model)}
    if (folder / "tokenizer.json").is_file():
        tree["data"] = {"tokenizer": str(folder / "tokenizer.json")}
    tree["checkpoint"] = {"start_from": str(folder)}
    needs = "# A run also needs train.steps, train.global_batch_size, train.seq_len and data.\n"
    text = f"# {config.get('model_type')} from {folder}\n{needs}{dump_yaml(tree)}"
    if to is None:
        return Reply(page=text.splitlines(), tree=lambda: tree)
    write_output("-o", to, text)
    run = f"parallel3d-train {to} train.steps=1000 train.global_batch_size=64 train.seq_len=1024"
    page = [f"wrote {to} for {folder}; next, run", f"  {run} data.source=tokens data.path=DATA"]
    return Reply(page=page, tree=lambda: tree)


def _check_tensors(folder: Path, model: ModelConfig) -> None:
    """Raises CheckpointError unless the names and shapes of the tensors in the files match the
    model."""
    # Imported here, because they import torch.
    from parallel3d.checkpoint.pretrained import refuse_another_model
    from parallel3d.layers.parameter import named_specs
    from parallel3d.models import unsharded_model

    specs = named_specs(unsharded_model(model))
    refuse_another_model(folder, model, {name: spec.shape for name, spec in specs})


def _changed_keys(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the `model:` section that differ from their defaults."""
    changed: dict[str, Any] = {}
    for key in fields(model):
        value = getattr(model, key.name)
        if value not in (key.default, {}):
            changed[key.name] = value
    for name in ("rope_scaling", "experts"):
        if name in changed:
            items = asdict(changed[name]).items()
            changed[name] = {key: value for key, value in items if value is not None}
    return changed

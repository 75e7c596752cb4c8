"""`parallel3d-plan models`, and the model that options select by name, Hugging Face `config.json`,
recipe or sizes.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from parallel3d.config.hugging_face import (
    CLASSES,
    check_model,
    from_hugging_face,
    ignored_keys,
    read_config_json,
    sizes_of,
    windowed_layers,
)
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.units import rounded
from parallel3d.planner.model.hf_config import (
    PLANNED_FAMILIES,
    hf_config_notes,
    hf_config_shape,
    text_part,
    window_notes,
)
from parallel3d.planner.model.named import card_config, named_shape, shape_names
from parallel3d.planner.model.parameters import (
    active_parameters,
    expert_numel,
    model_flops_per_token,
    rank_numel,
    total_parameters,
    whole_model,
)
from parallel3d.planner.model.shapes import ModelShape, StageSlice, from_config
from parallel3d.planner.report.json import model_tree
from parallel3d.planner.report.page import WIDTH, si
from parallel3d.recipes import shipped_recipes
from parallel3d.tools.aliases.lookup import known_name
from parallel3d.tools.cli_output import Reply

# Sizes that have the same name as an option and as a recipe key.
_NUMBERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to plan for, and its source.

    Attributes:
        shape: Shape of the model.
        said: Value of --model, or empty if the sizes were given.
        recipe: Recipe that defines the model, or None.
        config: Model configuration, or None if `recipe` has it or the trainer has no module for it.
        longest: `max_position_embeddings` of a config.json, or None.
        notes: Notes for the report, such as settings of the file that a plan ignores.
    """

    shape: ModelShape
    said: str = ""
    recipe: Recipe | None = None
    config: ModelConfig | None = None
    longest: int | None = None
    notes: tuple[str, ...] = ()


def answer(options: argparse.Namespace) -> Reply:
    """Lists the models that can be named, or counts the parameters of one model."""
    if options.name is not None:
        shape = read_model(options.name).shape
        return Reply(page=_show(shape), tree=lambda: rounded(model_tree(shape)))
    shapes = sorted(
        all_named(), key=lambda shape: (shape.name.rstrip("0123456789.bm"), total_parameters(shape))
    )
    return Reply(page=_list(shapes), tree=lambda: {"models": [model_tree(each) for each in shapes]})


def all_named() -> list[ModelShape]:
    cards = shape_cards()
    return [named_shape(name, cards) for name in shape_names(cards)]


def find_model(options: argparse.Namespace) -> Model:
    """Returns the model of --model or of the size options.

    Raises ConfigError if it is missing, unknown or invalid, or given both by name and by sizes.
    """
    by_hand = [
        name.replace("_", "-") for name in (*_NUMBERS, "kind") if getattr(options, name) is not None
    ]
    if options.model is None and not by_hand:
        raise ConfigError(
            "--model: required; try --model llama3-8b, a config.json, or --layers 32 --hidden 4096 "
            "..."
        )
    if options.model is None:
        config = _from_numbers(options)
        return Model(shape=replace(from_config(config), name="custom model"), config=config)
    if by_hand:
        raise ConfigError(
            f"--{by_hand[0]}: cannot be combined with --model {options.model}; omit one of them"
        )
    return read_model(options.model)


def read_model(text: str) -> Model:
    """Reads a model by name or path (config.json, its folder or a recipe). Raises ConfigError if
    there is none.
    """
    path = Path(text)
    # Path.is_file() would raise for a name that is too long.
    if os.path.isfile(path / "config.json"):
        path = path / "config.json"
    if os.path.isdir(path):
        raise ConfigError(
            f"--model {text}: is a folder without config.json; give the path of a file"
        )
    if path.suffix == ".json":
        return _of_config_json(path, text)
    recipes = shipped_recipes()
    cards = shape_cards()
    if path.suffix in (".yaml", ".yml") or text in recipes:
        recipe = load_recipe(recipes.get(text, path), cards=cards)
        return Model(shape=from_config(recipe.model), said=text, recipe=recipe)
    known = known_name("model", text)
    card = card_config(known, cards[known]) if known in cards else None
    return Model(shape=named_shape(known, cards), said=text, config=card)


def _of_config_json(path: Path, text: str) -> Model:
    """Reads the model of a config.json. The trainer need not have a module for it."""
    said = read_config_json(path)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    foreign = hf_config_shape(said, name, path)
    if foreign:
        part = text_part(said)
        notes = (*hf_config_notes(said), *window_notes(part))
        config = None
        if said["model_type"] in CLASSES:
            config = from_hugging_face(said, path)
        elif part is said and foreign.latent is None:  # else the trainer has no rules for it
            config = ModelConfig(
                architecture="transformers", config=str(path), **sizes_of(said, path)
            )
            foreign = from_config(config)
        return Model(
            shape=foreign,
            said=text,
            config=config,
            longest=part.get("max_position_embeddings"),
            notes=notes,
        )
    config = from_hugging_face(said, path, others=PLANNED_FAMILIES)
    return Model(
        shape=replace(from_config(config), name=name, windowed_layers=windowed_layers(said)),
        said=text,
        config=config,
        longest=said.get("max_position_embeddings"),
        notes=(*ignored_keys(said, path), *window_notes(said)),
    )


def _from_numbers(options: argparse.Namespace) -> ModelConfig:
    """Returns a Llama or GPT configuration from the size options. Raises ConfigError if a size is
    missing or invalid.
    """
    required = ("layers", "hidden", "heads", "vocab")
    if missing := ", ".join(f"--{name}" for name in required if getattr(options, name) is None):
        example = "--layers 32 --hidden 4096 --heads 32 --vocab 32000"
        raise ConfigError(f"{missing}: required without --model; try {example}")
    gpt = options.kind == "gpt"
    usual = 4 * options.hidden if gpt else -(-8 * options.hidden // 3 // 256) * 256
    numbers = {name: getattr(options, name) for name in _NUMBERS}
    config = ModelConfig(
        **{**numbers, "ffn_hidden": options.ffn_hidden or usual},
        architecture="gpt" if gpt else "llama",
        max_positions=options.seq_len if gpt else None,
        tied_embeddings=gpt,
    )
    check_model(config, "custom model")
    return config


def _list(shapes: list[ModelShape]) -> Iterator[str]:
    cards = shape_cards()
    heads = "parameters  layers  hidden  heads  kv heads     ffn    vocab"
    yield f"{'name':<21}{heads}  trains"
    for shape in shapes:
        numbers = (
            f"{total_parameters(shape):>17,}{shape.layers:>6}{shape.hidden:>8}{shape.heads:>7}"
        )
        more = f"{shape.kv_heads:>10}{shape.ffn_hidden:>8}{shape.vocab:>9}"
        yield f"{shape.name:<18}{numbers}{more}  {'yes' if shape.name in cards else '-':>6}"
    yield ""
    yield "trains: a recipe can train it by model.name, because it has a shape card"


def _show(shape: ModelShape) -> Iterator[str]:
    """Yields a model's parameter counts and the fields of its shape that are not defaults."""
    total = total_parameters(shape)
    experts = shape.experts
    yield f"{shape.name}: {total:,} parameters ({si(total)})"
    ends = rank_numel(shape, (whole_model(shape)._replace(layers=0, dense=0),), 1)
    layer = rank_numel(shape, (StageSlice(layers=1, embedding=False, head=False),), 1)
    rows = [("embedding, last norm and head", ends), ("each layer", layer)]
    if experts is not None:
        rows.append(("active per token", active_parameters(shape)))
        rows.append(("all experts", expert_numel(shape, shape.layers - shape.first_dense)))
    for label, count in rows:
        yield f"  {label:<30}{count:>18,}"
    said = []
    for key in fields(shape):
        value = getattr(shape, key.name)
        if value != key.default and key.name not in ("name", "experts", "latent"):
            said.append(f"{key.name.replace('_', ' ')} {value}")
    if experts is not None:
        said.append(f"{experts.per_token} of {experts.count} experts of ffn {experts.hidden}")
    yield from textwrap.wrap(", ".join(said), WIDTH)
    flops = model_flops_per_token(shape, 4096)
    yield f"model FLOPs per token at length 4096, forward and backward: {flops / 1e9:,.1f} G"

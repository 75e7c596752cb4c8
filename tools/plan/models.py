"""`parallel3d-plan models`, and the model that the options mean: a name, a Hugging Face
`config.json`, a recipe, or numbers by hand."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from parallel3d.config.hugging_face import (
    check_model,
    from_hugging_face,
    left_out,
    read_config_json,
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

# options, and keys of a recipe
_NUMBERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape, and what it was read from: `said` is the user's word for it, `recipe` the recipe
    that was read, `config` what the trainer knows of the model (None: it has no module for it),
    `longest` the most tokens of a sequence that a config.json tells, and `notes` what a file says
    and a plan does not count."""

    shape: ModelShape
    said: str = ""
    recipe: Recipe | None = None
    config: ModelConfig | None = None
    longest: int | None = None
    notes: tuple[str, ...] = ()


def answer(options: argparse.Namespace) -> Reply:
    """Lists the models with a name, or counts the parameters of one."""
    if options.name is not None:
        shape = read_model(options.name).shape
        return Reply(page=lambda: _show(shape), tree=lambda: rounded(model_tree(shape)))
    shapes = sorted(
        all_named(), key=lambda shape: (shape.name.rstrip("0123456789.bm"), total_parameters(shape))
    )
    return Reply(
        page=lambda: _list(shapes), tree=lambda: {"models": [model_tree(each) for each in shapes]}
    )


def all_named() -> list[ModelShape]:
    """Returns the shapes of all models with a name."""
    cards = shape_cards()
    return [named_shape(name, cards) for name in shape_names(cards)]


def find_model(options: argparse.Namespace) -> Model:
    """Returns the model that the options name or number. Raises ConfigError for none, for a name
    and numbers at once, and for an unknown name (with the nearest)."""
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
        return Model(shape=replace(from_config(config), name="model by hand"), config=config)
    if by_hand:
        raise ConfigError(
            f"--{by_hand[0]}: does not go with --model {options.model}; give one of the two"
        )
    return read_model(options.model)


def read_model(text: str) -> Model:
    """Returns the model of a name or a path. Raises ConfigError where it finds no model."""
    path = Path(text)
    # which a name that is too long is not; Path.is_file raises
    if os.path.isfile(path / "config.json"):
        path = path / "config.json"
    if os.path.isdir(path):
        raise ConfigError(
            f"--model {text}: a folder without a config.json; try the path of the file"
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
    """Returns the model of a config.json: of a family that the trainer has, or of one that is only
    planned."""
    said = read_config_json(path)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    foreign = hf_config_shape(said, name, path)
    if foreign is not None:
        part = text_part(said)
        notes = (*hf_config_notes(said), *window_notes(part))
        return Model(
            shape=foreign, said=text, longest=part.get("max_position_embeddings"), notes=notes
        )
    # Phi 3 is a Llama whose matrices are packed in its files.
    plain = {**said, "model_type": "llama"} if said.get("model_type") == "phi3" else said
    config = from_hugging_face(plain, path, others=("phi3", *PLANNED_FAMILIES))
    return Model(
        shape=replace(from_config(config), name=name, windowed_layers=windowed_layers(plain)),
        said=text,
        config=config,
        longest=said.get("max_position_embeddings"),
        notes=(*left_out(plain, path), *window_notes(plain)),
    )


def _from_numbers(options: argparse.Namespace) -> ModelConfig:
    """Returns the model of --layers, --hidden and the other numbers, a Llama or a GPT in what they
    leave open."""
    required = ("layers", "hidden", "heads", "vocab")
    if missing := ", ".join(f"--{name}" for name in required if getattr(options, name) is None):
        example = "--layers 32 --hidden 4096 --heads 32 --vocab 32000"
        raise ConfigError(f"{missing}: required where there is no --model; try {example}")
    gpt = options.kind == "gpt"
    usual = 4 * options.hidden if gpt else -(-8 * options.hidden // 3 // 256) * 256
    numbers = {name: getattr(options, name) for name in _NUMBERS}
    config = ModelConfig(
        **{**numbers, "ffn_hidden": options.ffn_hidden or usual},
        architecture="gpt" if gpt else "llama",
        max_positions=options.seq_len if gpt else None,
        tied_embeddings=gpt,
    )
    check_model(config, "model by hand")
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
    yield "trains: has a shape card, so that a recipe may say model.name"


def _show(shape: ModelShape) -> Iterator[str]:
    """Yields the parameters of a model and its numbers that are not at their defaults."""
    total = total_parameters(shape)
    experts = shape.experts
    yield f"{shape.name}: {total:,} parameters ({si(total)})"
    ends = rank_numel(shape, (replace(whole_model(shape), layers=0, dense=0),), 1)
    layer = rank_numel(shape, (StageSlice(layers=1, embedding=False, head=False),), 1)
    rows = [("embedding, last norm and head", ends), ("each layer", layer)]
    if experts is not None:
        rows.append(("a token meets", active_parameters(shape)))
        rows.append(("all experts", expert_numel(shape, whole_model(shape))))
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
    yield f"model FLOPs of a token at sequences of 4096, forward and backward: {flops / 1e9:,.1f} G"

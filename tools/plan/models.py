"""`parallel3d-plan models`, and the model that the options mean: a name, a Hugging Face `config.json`, a recipe, or
numbers by hand."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from parallel3d.config.hugging_face import (
    check_model,
    model_of,
    notes_on,
    read_config_json,
    window_notes,
    windowed_layers,
)
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.units import rounded
from parallel3d.planner.model.foreign import FOREIGN_FAMILIES, foreign_notes, foreign_shape, text_part
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
from parallel3d.planner.report.text import WIDTH, si
from parallel3d.recipes import shipped_recipes
from parallel3d.tools.names.lookup import find_name, unknown_name
from parallel3d.tools.reply import Reply

_NUMBERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab")  # options, and keys of a recipe


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape, and what it was read from: `said` is the user's word for it, `recipe` the recipe that was read, `config`
    what the trainer knows of the model (None: it has no module for it), `longest` the most tokens of a sequence that a
    config.json tells, and `notes` what a file says and a plan does not count."""

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
    shapes = sorted(all_named(), key=lambda shape: (shape.name.rstrip("0123456789.bm"), total_parameters(shape)))
    return Reply(page=lambda: _list(shapes), tree=lambda: {"models": [model_tree(each) for each in shapes]})


def all_named() -> list[ModelShape]:
    """Returns the shapes of all models with a name."""
    cards = shape_cards()
    return [named_shape(name, cards) for name in shape_names(cards)]


def find_model(options: argparse.Namespace) -> Model:
    """Returns the model that the options name or number. Raises ConfigError for none, for a name and numbers at once,
    and for an unknown name (with the nearest)."""
    by_hand = [name.replace("_", "-") for name in (*_NUMBERS, "kind") if getattr(options, name) is not None]
    if options.model is None and not by_hand:
        raise ConfigError("--model: required; try --model llama3-8b, a config.json, or --layers 32 --hidden 4096 ...")
    if options.model is None:
        config = _from_numbers(options)
        return Model(shape=replace(from_config(config), name="model by hand"), config=config)
    if by_hand:
        raise ConfigError(f"--{by_hand[0]}: does not go with --model {options.model}; give one of the two")
    return read_model(options.model)


def read_model(text: str) -> Model:
    """Returns the model of a name or a path. Raises ConfigError where it finds no model."""
    path = Path(text)
    if os.path.isfile(path / "config.json"):  # which a name that is too long is not; Path.is_file raises
        path = path / "config.json"
    if os.path.isdir(path):
        raise ConfigError(f"--model {text}: a folder without a config.json; try the path of the file")
    if path.suffix == ".json":
        return _of_config_json(path, text)
    recipes, cards = shipped_recipes(), shape_cards()
    if path.suffix in (".yaml", ".yml") or text in recipes:
        recipe = load_recipe(recipes.get(text, path), cards=cards)
        return Model(shape=from_config(recipe.model), said=text, recipe=recipe)
    known = find_name("model", text)
    if known is None:
        raise unknown_name("model", text)
    card = card_config(known, cards[known]) if known in cards else None
    return Model(shape=named_shape(known, cards), said=text, config=card)


def _of_config_json(path: Path, text: str) -> Model:
    """Returns the model of a config.json: of a family that the trainer has, or of one that is only planned."""
    said = read_config_json(path)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    foreign = foreign_shape(said, name, path)
    if foreign is not None:
        part = text_part(said)
        notes = (*foreign_notes(said), *window_notes(part))
        return Model(shape=foreign, said=text, longest=part.get("max_position_embeddings"), notes=notes)
    # Phi 3 is a Llama whose matrices are packed in its files.
    plain = {**said, "model_type": "llama"} if said.get("model_type") == "phi3" else said
    config = model_of(plain, path, others=("phi3", *FOREIGN_FAMILIES))
    return Model(
        shape=replace(from_config(config), name=name, windowed_layers=windowed_layers(plain)),
        said=text,
        config=config,
        longest=said.get("max_position_embeddings"),
        notes=tuple(notes_on(plain, path)),
    )


def _from_numbers(options: argparse.Namespace) -> ModelConfig:
    """Returns the model of --layers, --hidden and the other numbers, a Llama or a GPT in what they leave open."""
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
    yield "name                 parameters  layers  hidden  heads  kv heads     ffn    vocab  trains"
    for shape in shapes:
        yield (
            f"{shape.name:<18}{total_parameters(shape):>17,}{shape.layers:>6}{shape.hidden:>8}{shape.heads:>7}"
            f"{shape.kv_heads:>10}{shape.ffn_hidden:>8}{shape.vocab:>9}  {'yes' if shape.name in cards else '-':>6}"
        )
    yield ""
    yield "trains: has a shape card, so that a recipe may say model.name"


def _show(shape: ModelShape) -> Iterator[str]:
    total, experts = total_parameters(shape), shape.experts
    embedding = rank_numel(shape, (StageSlice(layers=0, embedding=True, head=False),), 1)
    block, first = (rank_numel(shape, (StageSlice(layers=1, embedding=False, head=False, dense=d),), 1) for d in (0, 1))
    routed, layers = expert_numel(shape, (whole_model(shape),)), shape.layers - shape.first_dense
    active = f", of which a token meets {si(active_parameters(shape))}" if experts is not None else ""
    yield f"{shape.name}: {total:,} parameters ({si(total)}){active}"
    rest = total - embedding - layers * block - shape.first_dense * first - routed
    rows = [("embedding", embedding, "  (also the output table)" * shape.tied_embeddings)]
    rows += [(f"{shape.first_dense} dense layers each", first, "")] * (shape.first_dense > 0)
    rows += [(f"{layers} layers each", block, "  beside their experts" * (experts is not None))]
    if experts is not None:
        rows += [(f"{experts.count} experts each", routed // experts.count // layers, "  in each of these layers")]
    for label, count, more in (*rows, ("norm and head", rest, "")):
        yield f"  {label:<20}{count:>16,}{more}"
    norm = "LayerNorm" if shape.layer_norm else "RMSNorm"
    biases = "biases" if shape.biases else "biases on q, k, v" if shape.qkv_biases else "no biases"
    ffn = f"ffn {shape.ffn_hidden} ({shape.feed_forward})"
    if experts is not None:
        shared = f" and a shared part of {experts.shared_hidden}" if experts.shared_hidden else ""
        ffn = f"{experts.per_token} of {experts.count} experts of ffn {experts.hidden}{shared}"
        ffn += f", ffn {shape.ffn_hidden} in the first {shape.first_dense}" if shape.first_dense else ""
    heads = f"heads {shape.heads} of {shape.head_dim}, kv heads {shape.kv_heads}"
    heads += ", latent attention" if shape.latent is not None else ""
    window = f", a window of {shape.window} in {shape.windowed_layers} layers" if shape.window is not None else ""
    told = f"layers {shape.layers}, hidden {shape.hidden}, {heads}, {ffn}, vocabulary {shape.vocab}, "
    yield from textwrap.wrap(f"{told}{shape.positions} positions, {norm}, {biases}{window}", WIDTH)
    flops = model_flops_per_token(shape, 4096)
    yield f"model FLOPs of a token at sequences of 4096, forward and backward: {flops / 1e9:,.1f} G"

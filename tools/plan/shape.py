"""Which model is meant: a name, a Hugging Face `config.json`, a recipe, or numbers by hand."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import check_shape, from_hugging_face, named_shape, notes_on, shape_names
from parallel3d.planner.model.shapes import ModelShape, from_config
from parallel3d.recipes import shipped_recipes

_NUMBERS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
_REQUIRED = ("layers", "hidden", "heads", "vocab")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A shape, and what it was read from: `said` is the user's word for it, `path` that of a config.json or a recipe,
    and `recipe` the latter read."""

    shape: ModelShape
    source: Literal["name", "config.json", "recipe", "numbers"]
    said: str = ""
    path: Path | None = None
    recipe: Recipe | None = None
    longest: int | None = None  # sequence, by a config.json
    notes: tuple[str, ...] = ()  # what a config.json says and a plan does not count


def find_model(options: argparse.Namespace) -> Model:
    """Raises ConfigError for none, for both a name and numbers, for an unknown name (with the nearest)."""
    by_hand = [name for name in (*_NUMBERS, "kind") if getattr(options, name) is not None]
    if options.model is None:
        if not by_hand:
            raise ConfigError(
                "--model: required; try --model llama3-8b, a config.json, or --layers 32 --hidden 4096 ..."
            )
        return Model(shape=_from_numbers(options), source="numbers")
    if by_hand:
        option = by_hand[0].replace("_", "-")
        raise ConfigError(f"--{option}: does not go with --model {options.model}; give one of the two")
    return read_model(options.model)


def read_model(text: str) -> Model:
    """The model of a name or a path."""
    path = Path(text)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_dir():
        raise ConfigError(f"--model {text}: a folder without a config.json; try the path of the file")
    if path.suffix == ".json":
        shape = from_hugging_face(path)
        config = json.loads(path.read_text())
        return Model(
            shape=shape,
            source="config.json",
            said=text,
            path=path,
            notes=tuple(notes_on(config)),
            longest=config.get("max_position_embeddings"),
        )
    recipes, cards = shipped_recipes(), shape_cards()
    if path.suffix in (".yaml", ".yml") or text in recipes:
        path = recipes.get(text, path)
        recipe = load_recipe(path, cards=cards)
        return Model(shape=from_config(recipe.model), source="recipe", said=text, path=path, recipe=recipe)
    names = shape_names(cards)
    plain = text.strip().lower().replace("_", "-")
    known = text if text in names else plain
    if known not in names:
        near = get_close_matches(plain, [*names, *recipes], n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}?" if near else "see parallel3d-plan models"
        raise ConfigError(f"--model {text}: unknown; {advice}")
    return Model(shape=named_shape(known, cards), source="name", said=text)


def _from_numbers(options: argparse.Namespace) -> ModelShape:
    missing = [f"--{name}" for name in _REQUIRED if getattr(options, name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: required where there is no --model; "
            "try --layers 32 --hidden 4096 --heads 32 --vocab 32000"
        )
    gpt = options.kind == "gpt"
    usual = 4 * options.hidden if gpt else -(-8 * options.hidden // 3 // 256) * 256
    shape = ModelShape(
        name="model by hand",
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        ffn_hidden=options.ffn_hidden or usual,
        vocab=options.vocab,
        feed_forward="gelu" if gpt else "swiglu",
        positions="learned" if gpt else "rope",
        position_rows=options.seq_len or 0 if gpt else 0,
        tied_embeddings=gpt,
        biases=gpt,
        layer_norm=gpt,
    )
    check_shape(shape, "model by hand")
    return shape

"""From a YAML file to a checked recipe, and back.

`load_recipe` reads a file, lays `key=value` overrides over it, and checks the whole before any process starts. Nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import refuse, validate
from parallel3d.config.schema import Schema
from parallel3d.config.settings import Setting, dump_yaml, read_settings
from parallel3d.errors import ConfigError


def load_recipe(path: Path, overrides: Iterable[str] = (), *, cards: Mapping[str, Path]) -> Recipe:
    """The validated recipe of a YAML file: defaults <- shape card <- the file <- `key=value` overrides.

    `cards` are the shape cards that `model.name` may pick. A card picked by an override wins over the file's own
    numbers, since the file gave them for another model. Raises `ConfigError`, a line for each problem.
    """
    schema = Schema.of(Recipe)
    said = read_settings(path)
    refuse(schema.unknown(said))
    asked = [schema.override(text) for text in overrides]
    final = {setting.key: setting for setting in _with_card(said, asked, cards)}
    refuse(schema.faults(final.values()))
    some = " or ".join(sorted(cards, key=len)[:3])
    refuse(schema.missing(final, hints={"model": f", or pick a shape card, such as model.name = {some}"}))
    recipe = schema.build(final)
    assert isinstance(recipe, Recipe)
    if recipe.run_dir is None:
        recipe = replace(recipe, run_dir=f"runs/{path.stem}")
    validate(recipe)
    return recipe


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML that `load_recipe` reads back to the same."""
    return dump_yaml(_with_lists(asdict(recipe)))


def _with_lists(value: Any) -> Any:
    """Tuples as the lists that YAML has."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, tuple) else value


def _with_card(said: list[Setting], asked: list[Setting], cards: Mapping[str, Path]) -> Iterator[Setting]:
    """All settings, later ones winning: the card stands just below the layer that names it."""
    for layer, overruled in ((said, asked), (asked, [])):
        named = next((s for s in reversed(layer) if s.key == "model.name" and s.value is not None), None)
        if named is not None and not any(setting.key == "model.name" for setting in overruled):
            card = cards.get(str(named.value))
            if card is None:
                near = get_close_matches(str(named.value), cards, 1) or sorted(cards)
                raise ConfigError(f"{named}: no such shape card; try {' or '.join(near)}")
            yield from read_settings(card, under="model")
        yield from layer

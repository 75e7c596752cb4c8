"""Loads a recipe from YAML and writes it back.

`load_recipe` reads a file, applies `key=value` overrides, and checks everything before any process
starts. PyYAML reads the values and their line numbers, OmegaConf merges the layers, and pydantic
checks types and ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.config.example_values import any_of
from parallel3d.config.hugging_face import read_config_json, sizes_of
from parallel3d.config.import_class import BESIDE_RECIPES
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import check_rules, refuse
from parallel3d.config.schema import KEYS, read
from parallel3d.config.yaml_text import (
    COMMAND_LINE,
    Setting,
    dump_yaml,
    parse_value,
    read_settings,
    shown,
)
from parallel3d.errors import ConfigError

# Former defaults of removed keys, which files of earlier runs still contain.
_REMOVED = {
    "optimizer.stochastic_rounding": False,
    "optimizer.beta2_decay": None,
    "optimizer.update_clip": None,
    "optimizer.step_in_backward": False,
    "train.gc_every": None,
    "train.early_stop_patience": None,
    "train.early_stop_min_delta": 0.0,
    "train.early_stop_set": None,
    "local_sgd.transport": "fp32",
    "local_sgd.fragments": 1,
    "local_sgd.overlap_steps": 0,
    "local_sgd.mixing": None,
    "train.label_smoothing": 0.0,
}
_UNREADABLE = r"\$\{|[\ud800-\udfff]"


def load_recipe(path: Path, overrides: Iterable[str] = (), *, cards: Mapping[str, Path]) -> Recipe:
    """Loads and validates the recipe in a YAML file.

    Values come, in ascending priority, from defaults, the shape card, the file, and overrides. A
    shape card chosen by an override takes priority over sizes in the file, which were meant for
    another model. Modules that the recipe names are not imported.

    Args:
        path: YAML file of the recipe.
        overrides: Settings of the form `key=value`, such as "train.steps=50".
        cards: Shape cards that `model.name` can select, by name, as `shape_cards()` returns them.

    Returns:
        The recipe with all defaults filled in.

    Raises:
        ConfigError: The file cannot be read or the recipe breaks a rule. It has one line per
            problem, for at most 5 problems.

    Example:
        >>> from pathlib import Path
        >>> from parallel3d.models import shape_cards
        >>> recipe = parallel3d.load_recipe(
        ...     Path("my.yaml"), ["parallel.tp=2"], cards=shape_cards()
        ... )
        >>> recipe.parallel.tp
        2
    """
    asked = [_parse_override(text) for text in overrides]
    settings = [
        setting
        for setting in _with_card(read_settings(path), asked, cards)
        if setting.key not in _REMOVED or setting.value != _REMOVED[setting.key]
    ]
    run_dirs = [setting.value for setting in settings if setting.key == "run_dir"]
    if not run_dirs or run_dirs[-1] is None:
        default = Setting(key="run_dir", value=f"runs/{path.stem}", origin="its default")
        settings.append(default)
    # Surrogates stand for bytes that are not UTF-8.
    unreadable = [each for each in settings if re.search(_UNREADABLE, str(each.value))]
    rule = "must be UTF-8 text without ${variables}; write the value itself"
    refuse([f"{setting}: {rule}" for setting in unreadable])
    tree = _merge(settings)
    model = tree["model"]
    names_config = isinstance(model, dict) and isinstance(model.get("config"), str)
    if names_config and model.get("architecture") == "transformers":
        _add_sizes(model)
    recipe, errors = read(Recipe, tree, settings)
    refuse(errors)
    check_rules(recipe)
    if recipe.model.is_custom or recipe.train.callbacks:
        BESIDE_RECIPES[:] = dict.fromkeys([str(path.parent.resolve()), *BESIDE_RECIPES])
    return recipe


def _add_sizes(model: dict[str, Any]) -> None:
    """Adds the sizes of the config.json to the `model` section. Raises ConfigError if they differ
    from sizes in the recipe."""
    path = Path(model["config"])
    path = path / "config.json" if path.is_dir() else path
    options = model.get("options")
    config = read_config_json(path) | (options if isinstance(options, dict) else {})
    for key, size in sizes_of(config, path).items():
        given = model.setdefault(key, size)
        if given not in (size, None):
            raise ConfigError(
                f"model.{key} = {shown(given)}: {path} has {size}; remove model.{key}, or replace "
                "the key of the file by model.options"
            )
        model[key] = size


def read_options(owner: type[Any], options: Mapping[str, Any]) -> object:
    """Converts `model.options` into the options dataclass of your model class.

    Its fields give names, types, ranges (`in_range`) and defaults. Raises ConfigError if an
    option is invalid."""
    model = make_dataclass("model", [("options", owner)])
    recipe = make_dataclass("recipe", [("model", model)])
    recipe.__pydantic_config__ = Recipe.__pydantic_config__  # type: ignore[attr-defined]
    built, errors = read(recipe, {"model": {"options": dict(options)}})
    refuse(errors)
    return built.model.options


def to_yaml(recipe: Recipe) -> str:
    """Returns the complete recipe as YAML. `load_recipe` reads it back to an equal recipe."""
    return dump_yaml(asdict(recipe))


def _merge(settings: Iterable[Setting]) -> dict[str, Any]:
    """Merges settings into nested dicts. A later setting wins."""
    from omegaconf import OmegaConf  # Imported here, because --help does not need it.

    # Allow objects such as sets, which YAML can produce. pydantic rejects them later.
    tree = OmegaConf.create({"model": {}, "train": {}}, flags={"allow_objects": True})
    for setting in settings:
        if setting.value is None and setting.key in Recipe.__dataclass_fields__:
            continue  # An empty section keeps its defaults.
        try:
            OmegaConf.update(tree, setting.key, setting.value, merge=False, force_add=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{setting}: a list must be set completely; write [...]") from error
    merged: dict[str, Any] = OmegaConf.to_container(tree)  # type: ignore[assignment]
    return merged


def _with_card(
    said: list[Setting], asked: list[Setting], cards: Mapping[str, Path]
) -> list[Setting]:
    """Returns all settings in ascending priority. Those of a shape card (a file with the sizes of a
    model) come just before the file or the overrides that name it.
    """
    naming = [setting for setting in (*said, *asked) if setting.key == "model.name"]
    if not naming or naming[-1].value is None:
        return [*said, *asked]
    name = str(naming[-1].value)
    if name not in cards:
        near = get_close_matches(name, cards, 1) or sorted(cards, key=len)[:3]
        raise ConfigError(
            f"{naming[-1]}: no such shape card; try {any_of(near)}; parallel3d-plan models lists "
            "all"
        )
    card = read_settings(cards[name], under="model")
    return [*said, *card, *asked] if naming[-1] in asked else [*card, *said, *asked]


def _parse_override(text: str) -> Setting:
    """Parses a `key=value` of the command line. Raises ConfigError for any other form."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        words = "not an override; write key=value, such as optimizer.lr=1e-4"
        raise ConfigError(f"{shown(text)}: {words}")
    # The value of a text key is used literally unless it is quoted or null. YAML would misread
    # `*.py`.
    is_text_key = name in KEYS and KEYS[name].hint is str
    is_plain = value != "null" and not value.startswith(("'", '"'))
    parsed = value if is_text_key and is_plain else parse_value(value, name)
    return Setting(key=name, value=parsed, origin=COMMAND_LINE)

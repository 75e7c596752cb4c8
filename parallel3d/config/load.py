"""From a YAML file to a checked recipe, and back.

`load_recipe` reads a file, lays `key=value` overrides over it, and checks the whole before any process starts. The keys
are read off the recipe's dataclasses. This is the one file that imports OmegaConf, which checks each value against its
field's type and builds the recipe. Nothing here imports torch.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import refuse, validate
from parallel3d.config.unsupported import hint_for_key, hint_for_value
from parallel3d.config.yaml_text import COMMAND_LINE, Setting, dump_yaml, parse_value, read_settings, shown
from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class Key:
    """A key of a recipe: the type of its value, and its default (MISSING: it is required)."""

    hint: Any
    default: Any

    @property
    def choices(self) -> tuple[Any, ...]:
        """The alternatives of the type: (int, NoneType) for `int | None`, and the type itself for any other."""
        return get_args(self.hint) if get_origin(self.hint) in (Union, types.UnionType) else (self.hint,)

    @property
    def wanted(self) -> str:
        """The type in words, with a value that would do."""
        words = " or ".join(_describe(choice) for choice in self.choices)
        is_listed = any(get_origin(choice) is Literal or choice is bool for choice in self.choices)
        if is_listed or self.default in (MISSING, None):
            return words
        return f"{words}, such as {shown(self.default)}"

    def allows(self, value: object) -> bool:
        """False for a value that OmegaConf would convert although its writer has mistaken the key: anything for text,
        and a number for true or false."""
        if str in self.choices and not isinstance(value, str | None):
            return False
        return bool not in self.choices or isinstance(value, self.choices)


SECTIONS: dict[str, Any] = {name: hint for name, hint in get_type_hints(Recipe).items() if is_dataclass(hint)}
KEYS: dict[str, Key] = {
    f"{section}.{leaf.name}".lstrip("."): Key(hints[leaf.name], leaf.default)
    for section, owner in (*SECTIONS.items(), ("", Recipe))
    for hints in (get_type_hints(owner),)
    for leaf in fields(owner)
    if leaf.name not in SECTIONS
}


def load_recipe(path: Path, overrides: Iterable[str] = (), *, cards: Mapping[str, Path]) -> Recipe:
    """Returns the validated recipe of a YAML file: defaults <- shape card <- the file <- `key=value` overrides.

    `cards` are the shape cards that `model.name` may pick. A card picked by an override wins over the file's own
    numbers, since the file gave them for another model. Raises `ConfigError` with a line for each problem.
    """
    said = read_settings(path)
    refuse(unknown_keys(said))
    asked = [parse_override(text) for text in overrides]
    settings = {setting.key: setting for setting in _with_card(said, asked, cards)}
    some = " or ".join(sorted(cards, key=len)[:3])
    recipe, errors = build_recipe(settings, hints={"model": f", or pick a shape card, such as model.name = {some}"})
    refuse(errors)
    assert recipe is not None
    if recipe.run_dir is None:
        recipe = replace(recipe, run_dir=f"runs/{path.stem}")
    validate(recipe)
    return recipe


def to_yaml(recipe: Recipe) -> str:
    """Returns the whole recipe as YAML, which `load_recipe` reads back to an equal recipe."""
    return dump_yaml(asdict(recipe))


def _with_card(said: list[Setting], asked: list[Setting], cards: Mapping[str, Path]) -> Iterator[Setting]:
    """Yields all settings, of which a later one wins: the shape card comes just before the layer that names it."""
    for layer, overruled in ((said, asked), (asked, [])):
        named = next((s for s in reversed(layer) if s.key == "model.name" and s.value is not None), None)
        if named is not None and not any(setting.key == "model.name" for setting in overruled):
            card = cards.get(str(named.value))
            if card is None:
                near = get_close_matches(str(named.value), cards, 1) or sorted(cards)
                raise ConfigError(f"{named}: no such shape card; try {' or '.join(near)}")
            yield from read_settings(card, under="model")
        yield from layer


def build_recipe(settings: Mapping[str, Setting], *, hints: Mapping[str, str]) -> tuple[Recipe | None, list[str]]:
    """Returns the recipe of these settings, by key, with the defaults of all other keys; or None and one error line for
    each value of a wrong type, or else for each section whose required keys are not all given. `hints` says what else
    would do, by section."""
    config = OmegaConf.merge(OmegaConf.structured(Recipe), {section: {} for section in SECTIONS})
    assert isinstance(config, DictConfig)
    for part in (config, *(config[section] for section in SECTIONS)):
        OmegaConf.set_readonly(part, None)  # the dataclasses are frozen
    assigned = (_assign(config, setting) for setting in settings.values() if setting.key in KEYS)
    if errors := [error for error in assigned if error is not None]:
        return None, errors
    for section in SECTIONS:
        names = [f"{section}.{name}" for name in config[section] if OmegaConf.is_missing(config[section], name)]
        if names:
            them = f"set {'them' if names[1:] else 'it'}{hints.get(section, '')}"
            errors.append(f"{', '.join(names)}: required and not given; {them}")
    return (None, errors) if errors else (OmegaConf.to_object(config), [])  # type: ignore[return-value]


def unknown_keys(settings: Iterable[Setting]) -> list[str]:
    """Returns one error line for each setting whose key is not in the schema. A section without keys is known."""
    return [
        unknown_key(setting)
        for setting in settings
        if setting.key not in KEYS and not (setting.key in SECTIONS and setting.value is None)
    ]


def parse_override(text: str) -> Setting:
    """Reads a `key=value` of the command line as a setting. Raises ConfigError where it has another form, or the key is
    not in the schema."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"{shown(text)}: not an override; write key=value, such as optimizer.lr=1e-4")
    if name not in KEYS:
        raise ConfigError(unknown_key(Setting(key=name, value=value, origin=COMMAND_LINE)))
    # Text is taken as it stands (a pattern such as *.py means something else in YAML), unless it is quoted or null.
    is_verbatim = str in KEYS[name].choices and not value.startswith(("'", '"')) and value != "null"
    return Setting(key=name, value=value if is_verbatim else parse_value(value, name), origin=COMMAND_LINE)


def unknown_key(setting: Setting) -> str:
    """Returns the error line of a key that is not in the schema, with the nearest key that is."""
    if setting.key in SECTIONS:
        example = next(key for key in KEYS if key.startswith(setting.key + "."))
        return f"{setting}: a section, not a value; set its keys, such as {example}"
    section, _, leaf = setting.key.rpartition(".")
    by_leaf = {name.rpartition(".")[2]: name for name in KEYS}
    own = [name for name in KEYS if name.startswith(section + ".")] if section in SECTIONS else []
    near = (
        get_close_matches(setting.key, own, 1, cutoff=0.8)
        or [by_leaf[name] for name in get_close_matches(leaf, by_leaf, 1, cutoff=0.7)]
        or get_close_matches(setting.key, KEYS, 1, cutoff=0.6)
    )
    if (hint := hint_for_key(leaf)) is not None:
        advice = hint
    elif near:
        advice = f"did you mean {near[0]}?"
    else:
        others = [name for name in KEYS if "." not in name]
        advice = f"known are {', '.join(own or [*(f'{name}.*' for name in SECTIONS), *others])}"
    return f"{setting.key} ({setting.origin}): unknown key; {advice}"


def _assign(config: DictConfig, setting: Setting) -> str | None:
    """Sets a key of the recipe under construction. Returns the error line of a value that its type forbids."""
    key, value = KEYS[setting.key], setting.value
    if isinstance(value, str) and ("${" in value or value == "???"):
        return f"{setting}: a recipe does not read variables; write the value itself"
    numbers = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, float)]
    if any(number != number or abs(number) == float("inf") for number in numbers):
        return f"{setting}: must be {key.wanted}, and finite"
    try:
        if key.allows(value):
            OmegaConf.update(config, setting.key, value, merge=False)
            return None
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError, AttributeError):
        pass  # AttributeError: omegaconf 2.4's own, in making the message of a ValidationError
    hint = hint_for_value(setting.key, value)
    return f"{setting}: {hint or f'must be {key.wanted}{_yaml_trap(value, key.hint)}'}"


def _describe(hint: Any) -> str:
    """Returns one type in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "a list of whole numbers" if ... in get_args(hint) else f"a list of {len(get_args(hint))} numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return words[hint]


def _yaml_trap(value: object, hint: Any) -> str:
    """Returns the reason why YAML read a value other than its writer meant; empty where there is no such reason."""
    if isinstance(value, bool) and hint is not bool:
        words = "yes or on as true" if value else "no or off as false"
        return f" (YAML reads a bare {words}: quote it if you mean the word)"
    if isinstance(value, float) and value.is_integer() and hint is int:
        return f"; write {int(value)}"
    if not isinstance(value, str | list | None) and (hint is str or str in get_args(hint)):
        return f"; quote it: '{shown(value)}'"
    return ""

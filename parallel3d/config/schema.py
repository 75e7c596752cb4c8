"""The keys of a recipe, read from its dataclasses, and the translation of pydantic's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from parallel3d.config.recipe import Recipe
from parallel3d.config.unknown_keys import advice_on
from parallel3d.config.yaml_text import Setting, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# Phrases in pydantic's errors, and their replacements in ours.
_WORDS = {
    "Input should be": "must be",
    "String should": "must",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "an object": "keys and values",
    "'": "",
}


class Key(NamedTuple):
    """Type and default of a key. The type does not include None or the range."""

    hint: Any
    default: Any

    @property
    def section(self) -> Any:
        """Dataclass of a section or of the entries of a list, else None."""
        for each in (self.hint, *get_args(self.hint)):
            if is_dataclass(each):
                return each
        return None


@cache
def keys_of(owner: Any, under: str = "") -> dict[str, Key]:
    """Returns the keys of a dataclass and of its sections, by dotted name. Keys of list entries are
    named as if the list were a section."""
    hints = get_type_hints(owner)
    keys = {}
    for field in fields(owner):
        hint = hints[field.name]
        if NoneType in get_args(hint):
            hint = get_args(hint)[0]
        name = under + field.name
        keys[name] = key = Key(hint, field.default)
        if key.section is not None:
            keys |= keys_of(key.section, f"{name}.")
    return keys


KEYS = keys_of(Recipe)


@cache
def adapter(owner: Any) -> TypeAdapter[Any]:
    """Returns the pydantic validator of a dataclass. pydantic is imported here because --help does
    not need it."""
    from pydantic import TypeAdapter

    return TypeAdapter(owner)


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema of a recipe file, for completion in editors."""
    schema = adapter(Recipe).json_schema()
    del schema["$defs"]["ModelConfig"]["required"]  # A shape card can provide these.
    return schema


def range_errors(section: Any) -> list[str]:
    """Returns an error line for each number of a section or recipe that is out of range."""
    return read(type(section), asdict(section))[1]


def read(
    owner: Any, tree: Mapping[str, Any], settings: Sequence[Setting] = ()
) -> tuple[Any, list[str]]:
    """Validates a tree of values as the dataclass `owner`.

    Returns the dataclass and no errors, or None and an error line for each problem (one for all
    missing keys). `settings` give the origin of each value."""
    from pydantic import ValidationError

    # Validate as JSON, which has the types of YAML: lists become tuples, dicts become sections, and
    # nothing else is converted.
    text = json.dumps(tree, default=str)
    try:
        return adapter(owner).validate_json(text, strict=True), []
    except ValidationError as error:
        found = error.errors(include_url=False)
    missing = [_name(each["loc"]) for each in found if each["type"] == "missing"]
    lines = [_line(owner, each, settings) for each in found if each["type"] != "missing"]
    if missing:
        tries = "set them" if missing[1:] else "set it"
        if "model.layers" in missing:
            tries += ", or choose a shape card, such as model.name = llama3-8b"
        lines.append(f"{', '.join(missing)}: required but not set; {tries}")
    return None, lines


def _name(place: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".")


def _line(owner: Any, error: Mapping[str, Any], settings: Sequence[Setting]) -> str:
    """Formats one error of pydantic: the key, its value and origin, the rule, and a value that
    works."""
    name = _name(error["loc"])
    value = error["input"]
    listed = name.partition("[")[0]
    givers = [each for each in settings if f"{each.key}.".startswith(f"{listed}.")]
    origin = f" ({givers[-1].origin})" if givers else ""
    if error["type"] == "unexpected_keyword_argument":
        if givers and name == listed:
            name = givers[-1].key
        return f"{shown(name)}{origin}: unknown key; {advice_on(name, keys_of(owner))}"
    if error["type"] == "json_invalid":
        return "a key or value is not valid text; use characters of UTF-8"
    key = keys_of(owner)[".".join(part for part in error["loc"] if isinstance(part, str))]
    rule = error["msg"]
    for theirs, ours in _WORDS.items():
        rule = rule.replace(theirs, ours)
    tries = _example(key, error.get("ctx", {}))
    if isinstance(value, bool):
        rule += " (YAML reads yes, no, on and off without quotes as true or false; add quotes)"
    elif error["type"] == "string_type" and not isinstance(value, list | dict):
        tries = f"; try '{shown(value)}'"
    elif key.section is not None:
        rule += f" of {shown(', '.join(keys_of(key.section)))}"
    return f"{name} = {shown(value)}{origin}: {rule}{tries}"


def _example(key: Key, limits: Mapping[str, Any]) -> str:
    """Returns the end of an error line with a value that works: the default, or one in the range.
    Empty if neither exists."""
    if key.default not in (MISSING, None, ()):
        return f"; try {shown(key.default)}"
    if "gt" in limits:
        return f"; try {limits['gt'] + 1:g}"
    if "lt" in limits:
        return f"; try {limits['lt'] / 2:g}"
    limit = limits.get("ge", limits.get("le"))
    return "" if limit is None else f"; try {limit}"

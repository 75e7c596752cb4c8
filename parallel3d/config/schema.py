"""The keys of a recipe, read off its dataclasses, and pydantic's errors in this project's words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from parallel3d.config.recipe import Recipe
from parallel3d.config.yaml_text import Setting, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "text"}
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True)
class Key:
    """A key of a section: its type without None and ranges, and its default."""

    hint: Any
    default: Any
    is_optional: bool

    @property
    def entry(self) -> Any:
        """The dataclass of the entries if the value is a list of entries, else None."""
        items = get_args(self.hint)
        return items[0] if items and is_dataclass(items[0]) else None

    @property
    def wanted(self) -> str:
        """The type in words, with an example."""
        words = _words(self.hint)
        if self.is_optional:
            words += " or null"
        is_listed = get_origin(self.hint) is Literal or self.hint is bool
        if is_listed or self.default in (MISSING, None, ()):
            return words
        return f"{words}, such as {shown(self.default)}"

    def yaml_trap(self, value: object) -> str:
        """Explains why YAML read a value other than its writer meant it, or returns an empty
        string."""
        if isinstance(value, bool) and self.hint is not bool:
            words = "yes or on as true" if value else "no or off as false"
            return f" (YAML reads a bare {words}: quote it if you mean the word)"
        if isinstance(value, float) and value.is_integer() and self.hint is int:
            return f"; write {int(value)}"
        if self.hint is str and not isinstance(value, str | list | None):
            return f"; quote it: '{shown(value)}'"
        return ""


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is not tuple:
        return _WORDS.get(hint, "a section of keys")
    item, *more = get_args(hint)
    if is_dataclass(item):
        names = ", ".join(key.name for key in fields(item))
        return f"a list of entries {{{names}}}"
    if get_origin(item) is Literal:
        choices = get_args(item)
        return f"a list of some of {', '.join(choices)}, such as [{choices[0]}]"
    number = "" if ... in more else f"{len(more) + 1} "
    return f"a list of {number}{_PLURALS[item]}"


@cache
def keys_of(owner: Any) -> dict[str, Key]:
    """Returns the keys of a dataclass."""
    hints = get_type_hints(owner)
    keys = {}
    for key in fields(owner):
        choices = get_args(hints[key.name])
        is_optional = NoneType in choices
        keys[key.name] = Key(
            choices[0] if is_optional else hints[key.name], key.default, is_optional
        )
    return keys


def _dotted(owner: Any, under: str = "") -> Iterator[tuple[str, Key]]:
    for name, key in keys_of(owner).items():
        yield under + name, key
        if is_dataclass(key.hint):
            yield from _dotted(key.hint, f"{under}{name}.")


ALL = dict(_dotted(Recipe))
SECTIONS = {name: key for name, key in ALL.items() if is_dataclass(key.hint)}
KEYS = {name: key for name, key in ALL.items() if name not in SECTIONS}


@cache
def adapter(owner: Any) -> TypeAdapter[Any]:
    """Returns the validator of a dataclass. pydantic is imported here: --help needs none."""
    from pydantic import TypeAdapter

    return TypeAdapter(owner)


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema of a recipe file, for editors."""
    schema = adapter(Recipe).json_schema()
    del schema["$defs"]["ModelConfig"]["required"]  # a shape card may give these
    return schema


def range_errors(section: Any) -> Iterator[str]:
    """Yields a line for each number of a section, or of a recipe, that is out of its range."""
    yield from read(type(section), asdict(section))[1]


def read(
    owner: Any, tree: Mapping[str, Any], settings: Mapping[str, Setting] | None = None
) -> tuple[Any, list[str]]:
    """Returns the dataclass that a tree of values stands for, or None and a line for each error.
    `settings` say where each value comes from."""
    from pydantic import ValidationError

    # JSON has the types of YAML: lists for tuples, dicts for sections, nothing else converted.
    text = json.dumps(tree, default=lambda value: {"": str(value)})
    try:
        return adapter(owner).validate_json(text, strict=True), []
    except ValidationError as error:
        lines: dict[str, str] = {}
        missing: dict[str, list[str]] = {}
        for each in error.errors(include_url=False):
            place = _Place(owner, tree, each["loc"], settings or {})
            if each["type"] == "missing" and not isinstance(each["loc"][-1], int):
                missing.setdefault(place.section, []).append(place.name)
            else:
                lines.setdefault(place.name, place.line(each["type"], each.get("ctx", {})))
        for section, names in missing.items():
            tries = "set them" if names[1:] else "set it"
            if section == "model":
                tries += ", or pick a shape card, such as model.name = llama3-8b"
            lines[names[0]] = f"{', '.join(names)}: required and not given; {tries}"
        return None, list(lines.values())


class _Place:
    """The place of one of pydantic's errors: the name of the key, its type, its value, and where it
    was set."""

    def __init__(
        self,
        owner: Any,
        tree: Mapping[str, Any],
        loc: tuple[int | str, ...],
        settings: Mapping[str, Setting],
    ) -> None:
        self.name = self.section = ""
        self.key: Key | None = None
        self.value: Any = tree
        self.siblings = list(keys_of(owner))
        for index, part in enumerate(loc):
            if isinstance(part, int):
                if index + 1 == len(loc):
                    break  # a list is reported as a whole
                assert self.key is not None
                owner, self.name = self.key.entry, f"{self.name}[{part}]"
                self.value = self.value[part]
                continue
            self.section, self.siblings = self.name, list(keys_of(owner))
            self.name = f"{self.name}.{part}" if self.name else part
            self.key = keys_of(owner).get(part)
            self.value = self.value.get(part)
            owner = self.key.hint if self.key else None
        setting = settings.get(self.name.partition("[")[0])
        self.origin = f" ({setting.origin})" if setting else ""

    def line(self, error: str, context: Mapping[str, Any]) -> str:
        """Returns the line of an error."""
        said = f"{self.name} = {shown(self.value)}{self.origin}"
        if self.key is None:
            near = get_close_matches(self.name.rpartition(".")[2], self.siblings, 1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(self.siblings)}"
            return f"{said}: unknown key; {advice}"
        if error in _LIMITS:
            name, words = _LIMITS[error]
            each = " each" if isinstance(self.value, list | tuple) else ""
            limit = context[name]
            return (
                f"{said}:{each} must be {words} {_number(limit)}; try {self._example(name, limit)}"
            )
        more = ", and finite" if error == "finite_number" else self.key.yaml_trap(self.value)
        return f"{said}: must be {self.key.wanted}{more}"

    def _example(self, limit_name: str, limit: float) -> str:
        assert self.key is not None
        if self.key.default not in (MISSING, None, ()):
            return shown(self.key.default)
        if limit_name == "gt":
            limit += 1
        elif limit_name == "lt":
            limit -= 0.1
        text = _number(limit)
        return f"[{text}]" if isinstance(self.value, list | tuple) else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

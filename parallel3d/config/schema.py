"""The keys of a recipe, read off its dataclasses: which there are, what each accepts, and the error where one is wrong.

The one place that imports OmegaConf, which makes the dataclasses from plain values.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel3d.config.settings import COMMAND_LINE, Setting, parse_value, shown
from parallel3d.config.unsupported import hint_for_key, hint_for_value
from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class Key:
    """A leaf of the recipe: its dotted name, the type of its value, and its default (MISSING: required)."""

    name: str
    hint: Any
    default: Any

    @property
    def choices(self) -> tuple[Any, ...]:
        """The hint's alternatives: `int | None` is (int, NoneType), any other hint is alone."""
        return get_args(self.hint) if get_origin(self.hint) in (Union, types.UnionType) else (self.hint,)

    def faults(self, setting: Setting) -> Iterator[str]:
        """What is wrong with the type of a value, in one line or none."""
        value = setting.value
        if isinstance(value, str) and ("${" in value or value == "???"):
            yield f"{setting}: a recipe does not read variables; write the value itself"
        elif any(number != number or abs(number) == float("inf") for number in _floats(value)):
            yield f"{setting}: must be {self.wanted()}, and finite"
        elif not self._accepts(value):
            why = hint_for_value(self.name, value)
            yield f"{setting}: {why or f'must be {self.wanted()}{_yaml_trap(value, self.hint)}'}"

    def wanted(self) -> str:
        """The rule in words, with a value that would do."""
        words = " or ".join(_describe(choice) for choice in self.choices)
        is_listed = any(get_origin(choice) is Literal or choice is bool for choice in self.choices)
        if is_listed or self.default in (MISSING, None):
            return words
        return f"{words}, such as {shown(list(self.default) if isinstance(self.default, tuple) else self.default)}"

    @cached_property
    def _alone(self) -> type:
        """A section of this key only, as `value`: OmegaConf copies all of a section for each value that it looks at."""
        return make_dataclass("Alone", [("value", self.hint)])

    def _accepts(self, value: object) -> bool:
        # OmegaConf takes anything for text and any number for a bool; a person who writes so has mistaken the key.
        if str in self.choices and not isinstance(value, str | None):
            return False
        if bool in self.choices and not isinstance(value, self.choices):
            return False
        try:
            OmegaConf.merge(OmegaConf.structured(self._alone), {"value": value})
        except (OmegaConfBaseException, ValueError, TypeError, OverflowError):
            return False
        return True


@dataclass(frozen=True)
class Schema:
    """All keys of a dataclass whose fields are sections (dataclasses again) and values."""

    root: Any
    sections: Mapping[str, Any]
    keys: Mapping[str, Key]

    @classmethod
    def of(cls, root: Any) -> Schema:
        """Read off the dataclass's type hints."""
        sections = {name: hint for name, hint in get_type_hints(root).items() if is_dataclass(hint)}
        keys = {}
        for section, owner in (*sections.items(), ("", root)):
            hints = get_type_hints(owner)
            for leaf in fields(owner):
                if leaf.name not in sections:
                    name = f"{section}.{leaf.name}".lstrip(".")
                    keys[name] = Key(name, hints[leaf.name], leaf.default)
        return cls(root, sections, keys)

    def unknown(self, settings: Iterable[Setting]) -> list[str]:
        """A line for each setting of a key that is none."""
        return [self._unknown(setting) for setting in settings if not self._is_known(setting)]

    def override(self, text: str) -> Setting:
        """What `key=value` of the command line sets. Raises ConfigError where it is none, or the key is unknown."""
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"{shown(text)}: not an override; write key=value, such as optimizer.lr=1e-4")
        key = self.keys.get(name)
        if key is None:
            raise ConfigError(self._unknown(Setting(key=name, value=value, origin=COMMAND_LINE)))
        # Text is taken as it stands (a pattern such as *.py means something else in YAML), unless it is quoted or null.
        is_verbatim = str in key.choices and not value.startswith(("'", '"')) and value != "null"
        return Setting(key=name, value=value if is_verbatim else parse_value(value, name), origin=COMMAND_LINE)

    def faults(self, settings: Iterable[Setting]) -> list[str]:
        """A line for each value of a wrong type."""
        return [
            fault
            for setting in settings
            if setting.key in self.keys
            for fault in self.keys[setting.key].faults(setting)
        ]

    def missing(self, final: Mapping[str, Setting], *, hints: Mapping[str, str]) -> list[str]:
        """A line for each section whose required keys are not all given. `hints`: what else would do, by section."""
        problems = []
        for section in self.sections:
            required = [k.name for k in self.keys.values() if k.name.startswith(f"{section}.") and k.default is MISSING]
            names = [name for name in required if name not in final]
            if names:
                them = f"set {'them' if names[1:] else 'it'}{hints.get(section, '')}"
                problems.append(f"{', '.join(names)}: required and not given; {them}")
        return problems

    def build(self, final: Mapping[str, Setting]) -> Any:
        """The root dataclass, with its defaults where nothing is said."""
        tree: dict[str, Any] = {}
        for name in self.keys.keys() & final.keys():
            section, _, leaf = name.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = final[name].value
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(self.root), tree))

    def _is_known(self, setting: Setting) -> bool:
        is_empty_section = setting.key in self.sections and setting.value is None  # all of its keys commented out
        return setting.key in self.keys or is_empty_section

    def _unknown(self, setting: Setting) -> str:
        """The error of a key that is none, with the nearest one that is."""
        keys, sections = self.keys, self.sections
        if setting.key in sections:
            example = next(key for key in keys if key.startswith(setting.key + "."))
            return f"{setting}: a section, not a value; set its keys, such as {example}"
        section, _, leaf = setting.key.rpartition(".")
        by_leaf = {name.rpartition(".")[2]: name for name in keys}
        mine = [name for name in keys if name.startswith(section + ".")] if section in sections else []
        near = (
            get_close_matches(setting.key, mine, 1, cutoff=0.8)
            or [by_leaf[name] for name in get_close_matches(leaf, by_leaf, 1, cutoff=0.7)]
            or get_close_matches(setting.key, keys, 1, cutoff=0.6)
        )
        why = hint_for_key(leaf)
        if why is not None:
            advice = why
        elif near:
            advice = f"did you mean {near[0]}?"
        else:
            others = [name for name in keys if "." not in name]
            advice = f"known are {', '.join(mine or [*(f'{name}.*' for name in sections), *others])}"
        return f"{setting.key} ({setting.origin}): unknown key; {advice}"


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "a list of whole numbers" if ... in get_args(hint) else f"a list of {len(get_args(hint))} numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return words[hint]


def _yaml_trap(value: object, hint: Any) -> str:
    """Why a value is not what its writer saw."""
    if isinstance(value, bool) and hint is not bool:
        words = "yes or on as true" if value else "no or off as false"
        return f" (YAML reads a bare {words}: quote it if you mean the word)"
    if isinstance(value, float) and value.is_integer() and hint is int:
        return f"; write {int(value)}"
    if not isinstance(value, str | list | None) and (hint is str or str in get_args(hint)):
        return f"; quote it: '{shown(value)}'"
    return ""


def _floats(value: object) -> Iterator[float]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float):
            yield item

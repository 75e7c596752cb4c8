"""The fields of a published case: what it states, what its source lets one infer, and defaults.

A row may miss sections and have null anywhere. What stands for a missing field is noted in
`filled`; a field that must be there, or says what cannot be, is a ValueError that names key, value
and rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import yaml


class Fields:
    """A case's sections, with null fields filled from `inferred` and defaults, and a note of each
    that was."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        if not isinstance(tree, Mapping):
            raise ValueError(
                "a case must be an object with the sections model, hardware, parallel, train, "
                "measured"
            )
        self.tree = tree
        self.filled: list[str] = []

    def section(self, name: str) -> Mapping[str, Any]:
        """Empty where the case has none."""
        section = self.tree.get(name)
        if isinstance(section, Mapping):
            return section
        return {}

    def stated(self, section: str, key: str) -> Any:
        """What the source itself says, None where it says nothing."""
        return self.section(section).get(key)

    def text(self, key: str) -> str:
        """Returns a text of the case itself, such as its framework or its notes."""
        return str(self.tree.get(key) or "")

    def said(self, name: str) -> bool | None:
        """Returns whether a run had an option; None if its case does not say."""
        value = self.section("options").get(name, meaning(name, self.text("notes")))
        if value is None:
            return None
        return bool(value)

    def get(self, section: str, key: str, default: Any) -> Any:
        value = self.stated(section, key)
        if value is not None:
            return value
        inferred = self.section("inferred").get(key)
        self.note(section, key, "inferred" if inferred is not None else "default")
        if inferred is None:
            return default
        return inferred

    def note(self, section: str, key: str, why: str) -> None:
        self.filled.append(f"{section}.{key} ({why})")

    def number(self, section: str, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Reads a whole number. Raises ValueError where it is no number or below `least`, or has no
        default."""
        value = self.get(section, key, default)
        if value is None:
            raise ValueError(
                f"{section}.{key}: is missing and nothing stands for it; the source's figure would "
                "do"
            )
        number = _number(value)
        if number is None or number != int(number) or number < least:
            raise ValueError(f"{section}.{key} = {value}: must be a whole number, at least {least}")
        return int(number)

    def flag(self, section: str, key: str, default: bool) -> bool:
        return bool(self.get(section, key, default))

    def figure(self, key: str) -> float | None:
        """Returns a figure of the section `measured`; one that is not a number above 0 is left
        out, and noted."""
        value = self.stated("measured", key)
        number = _number(value)
        if value is not None and (number is None or number <= 0):
            self.note("measured", key, f"no figure: {value}")
            return None
        return number

    def speed(self, key: str) -> float | None:
        """Returns the GB/s of a link of the section `hardware`; None if it does not say."""
        number = _number(self.stated("hardware", key))
        if number is not None and number > 0:
            return number
        return None


def _number(value: object) -> float | None:
    """Returns a number as a float; None for what is not a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


@cache
def read_table(name: str) -> dict[str, Any]:
    """Returns the content of a file of this folder."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text())
    return table


def meaning(table: str, text: str) -> Any:
    """Returns what a text means by a table of words.yaml; None where none of the table's patterns
    is in the text."""
    for pattern, value in read_table("words.yaml")[table].items():
        if re.search(pattern, text.lower(), re.DOTALL):
            return value
    return None

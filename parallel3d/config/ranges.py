"""The range of each number of a recipe, as metadata of the dataclass field that holds it, and the values that error
lines suggest."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any

from parallel3d.config.yaml_text import shown
from parallel3d.row_split import divisors

_LARGEST_DIVISOR = 4096  # the largest divisor that an error line suggests
_MOST_TRIES = 6
_LARGEST_COUNT = 2**40  # a larger whole number is a slip of the keyboard
MOST_DEVICES = 2**20  # of one run: several times those of the largest cluster there is
_TESTS = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}


def within(words: str, default: Any = MISSING, *, example: str | None = None) -> Any:
    """A dataclass field whose number must lie in the range that `words` say, such as "at least 0 and below 1" or "above
    0 and finite". `example` is the value that an error suggests; the default is suggested where there is no example."""
    return field(default=default, metadata={"range": words, "example": example or f"{default:g}"})


def up_to(most: int, default: Any = MISSING) -> Any:
    """A dataclass field whose count is at least 1 and at most `most`, beyond which nobody has trained anything: a
    larger one would only be found out when memory or patience has ended."""
    return field(default=default, metadata={"most": most})


def is_within(words: str, number: float) -> bool:
    """Returns whether a number lies in the range that `words` say. NaN lies in none."""
    limits = re.findall(r"(above|at least|below|at most) (-?[\d.]+)", words)
    is_finite = math.isfinite(number) or "finite" not in words
    return is_finite and all(_TESTS[test](number, float(limit)) for test, limit in limits)


def range_errors(recipe: Any) -> Iterator[str]:
    """One line for each number of the recipe's sections that lies outside of its range, whole numbers first.

    Every whole number counts something: where its field names no range it must be at least 1."""
    for name, value, metadata in sorted(_numbers(recipe), key=lambda number: not isinstance(number[1], int)):
        words = metadata.get("range", "at least 1")
        if not all(is_within(words, number) for number in (value if isinstance(value, tuple) else [value])):
            said = f"{shown(value)}: each" if isinstance(value, tuple) else f"{shown(value)}:"
            yield f"{name} = {said} must be {words}; try {metadata.get('example', 1)}"
        elif isinstance(value, int) and value > (most := metadata.get("most", _LARGEST_COUNT)):
            power = f"2^{most.bit_length() - 1} = " if most.bit_count() == 1 else ""
            yield f"{name} = {shown(value)}: must be at most {power}{most}"


def _numbers(section: Any, under: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yields the key, the value and the metadata of each number of a section, of the sections in it and of the entries
    of its lists."""
    for key in fields(section):
        name, value = f"{under}{key.name}", getattr(section, key.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            for index, entry in enumerate(value):
                yield from _numbers(entry, f"{name}[{index}].")
        elif value is not None and (
            "range" in key.metadata or (isinstance(value, int) and not isinstance(value, bool))
        ):
            yield name, value, key.metadata


def any_of(values: Iterable[object]) -> str:
    """Returns the values in words: `2, 4 or 8`."""
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last


def nearest(values: Iterable[int], near: int) -> list[int]:
    """Returns the values that are nearest to `near`, at most six, in ascending order."""
    return sorted(sorted(values, key=lambda value: abs(value - near))[:_MOST_TRIES])


def divisors_near(number: int, near: int) -> list[int]:
    """Returns the divisors of `number` that are nearest to `near`, at most six, in ascending order."""
    return nearest((d for d in divisors(number) if d <= _LARGEST_DIVISOR), near)


def multiple_from(smallest: int, factor: int) -> int:
    """Returns the first multiple of `factor` that is not below `smallest`."""
    return -(-smallest // factor) * factor


def multiples_near(number: int, factor: int) -> list[int]:
    """Returns the multiples of `factor` on both sides of `number`."""
    below = number // factor * factor
    return [below, below + factor] if below else [factor]

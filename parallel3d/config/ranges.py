"""The range of each number of a recipe, as metadata of the dataclass field that holds it, and the values that error
lines suggest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any

from parallel3d.row_split import divisors

_LARGEST_DIVISOR = 4096  # the largest divisor that an error line suggests
_MOST_TRIES = 6
_LARGEST_COUNT = 2**40  # a larger whole number is a slip of the keyboard


@dataclass(frozen=True)
class Range:
    """An interval: in the words of an error's line, and as a test of a number (NaN is in no interval)."""

    words: str
    contains: Callable[[float], bool]


FROM_ONE = Range("at least 1", lambda x: x >= 1)  # the range of a whole number whose field names no other
FROM_ZERO = Range("at least 0", lambda x: x >= 0)
ABOVE_ZERO = Range("above 0 and finite", lambda x: 0 < x < math.inf)
ABOVE_ONE = Range("above 1 and finite", lambda x: 1 < x < math.inf)
ZERO_OR_MORE = Range("0 or more and finite", lambda x: 0 <= x < math.inf)
BELOW_ONE = Range("at least 0 and below 1", lambda x: 0 <= x < 1)
BETWEEN_ZERO_AND_ONE = Range("above 0 and below 1", lambda x: 0 < x < 1)


def within(allowed: Range, default: Any, *, example: str | None = None) -> Any:
    """A dataclass field whose number must lie in `allowed`. `example` is the value that an error suggests; the default
    is suggested where there is no example."""
    return field(default=default, metadata={"range": allowed, "example": example or f"{default:g}"})


def range_errors(recipe: Any) -> Iterator[str]:
    """One line for each number of the recipe's sections that lies outside of its range, whole numbers first.

    Every whole number counts something: where its field names no range it must be at least 1."""
    sections = [section.name for section in fields(recipe) if is_dataclass(getattr(recipe, section.name))]
    keys = [(f"{name}.{key.name}", key) for name in sections for key in fields(getattr(recipe, name))]
    values = [(name, attrgetter(name)(recipe), key.metadata) for name, key in keys]
    for name, value, metadata in values:
        if isinstance(value, int) and not isinstance(value, bool):
            allowed = metadata.get("range", FROM_ONE)
            if not allowed.contains(value):
                yield f"{name} = {value}: must be {allowed.words}; try {metadata.get('example', 1)}"
            elif value > _LARGEST_COUNT:
                yield f"{name} = {value}: must be at most 2^40 = {_LARGEST_COUNT}"
    for name, value, metadata in values:
        if "range" not in metadata or value is None or isinstance(value, int):
            continue
        allowed, numbers = metadata["range"], value if isinstance(value, tuple) else (value,)
        if not all(map(allowed.contains, numbers)):
            said = f"{list(value)}: each" if isinstance(value, tuple) else f"{value}:"
            yield f"{name} = {said} must be {allowed.words}; try {metadata['example']}"


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

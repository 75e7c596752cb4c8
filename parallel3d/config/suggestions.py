"""The values that an error suggests instead of the one that broke a rule."""

from __future__ import annotations

from collections.abc import Iterable


def any_of(values: Iterable[object]) -> str:
    """Returns the values in words: `2, 4 or 8`."""
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last


def nearest(values: Iterable[int], near: int) -> list[int]:
    """Returns the values that are nearest to `near`, at most six, in ascending order."""
    return sorted(sorted(values, key=lambda value: abs(value - near))[:6])


def multiple_from(smallest: int, factor: int) -> int:
    """Returns the first multiple of `factor` that is not below `smallest`."""
    return -(-smallest // factor) * factor


def multiples_near(number: int, factor: int) -> list[int]:
    """Returns the multiples of `factor` on both sides of `number`."""
    below = number // factor * factor
    return [below, below + factor] if below else [factor]

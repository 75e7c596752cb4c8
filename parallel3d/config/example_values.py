"""Suggested values for error messages."""

from __future__ import annotations

from collections.abc import Iterable


def any_of(values: Iterable[object]) -> str:
    """Joins values in words, as in `2, 4 or 8`."""
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last


def nearest(values: Iterable[int], near: int) -> list[int]:
    """Returns the values nearest to `near`, at most six, in ascending order."""
    return sorted(sorted(values, key=lambda value: abs(value - near))[:6])


def multiple_from(smallest: int, factor: int) -> int:
    """Returns the smallest multiple of `factor` that is at least `smallest`."""
    return -(-smallest // factor) * factor


def multiples_near(number: int, factor: int) -> list[int]:
    """Returns the last positive multiple of `factor` up to `number`, if any, and the next."""
    below = number // factor * factor
    return [below, below + factor] if below else [factor]

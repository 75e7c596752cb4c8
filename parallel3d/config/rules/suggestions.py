"""Values that would do, for the ends of error lines."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.shards import divisors

_LARGEST_DIVISOR = 4096  # the largest divisor that an error line suggests
_MOST_TRIES = 6


def any_of(values: Iterable[object]) -> str:
    """The values in words: `2, 4 or 8`."""
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last


def nearest(values: Iterable[int], near: int) -> list[int]:
    """The values that are nearest to `near`, at most six, in ascending order."""
    return sorted(sorted(values, key=lambda value: abs(value - near))[:_MOST_TRIES])


def divisors_near(number: int, near: int) -> list[int]:
    """The divisors of `number` that are nearest to `near`, at most six, in ascending order."""
    return nearest((d for d in divisors(number) if d <= _LARGEST_DIVISOR), near)


def multiple_from(smallest: int, factor: int) -> int:
    """The first multiple of `factor` that is not below `smallest`."""
    return -(-smallest // factor) * factor


def multiples_near(number: int, factor: int) -> list[int]:
    """The multiples of `factor` on both sides of `number`."""
    below = number // factor * factor
    return [below, below + factor] if below else [factor]

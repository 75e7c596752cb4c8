"""Units and rounding of the planner's figures."""

from __future__ import annotations

from typing import Any

GIB = 2**30
# Factor that keeps a lower bound below the exact value despite rounding in its sums.
ROUNDED = 1 - 1e-9


def rounded(value: object, digits: int = 5) -> Any:
    """Rounds all floats in nested dicts, lists and tuples to `digits` significant digits. Tuples
    become lists."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value

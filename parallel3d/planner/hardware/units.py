"""The units that the planner's figures are written in, and how far they are rounded."""

from __future__ import annotations

from typing import Any

GIB = 2**30
ROUNDED = 1 - 1e-9  # makes a lower bound one whatever the order of its sums


def rounded(value: object, digits: int = 5) -> Any:
    """Returns plain data for JSON: floats with so many digits, at any depth of lists and dicts;
    tuples become lists."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value

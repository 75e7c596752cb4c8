"""The spread of the planner's errors on published runs: what `model.spread` gives ranges by. Each
source counts as much as any other, however many runs it has."""

from __future__ import annotations

from collections import Counter
from math import log1p
from typing import Any

from parallel3d.planner.model.uncertainty import FIGURES, LEVEL, Figure
from parallel3d.planner.published.score import Score


def recorded_errors(fitted: Score, blind: Score) -> dict[str, Any]:
    """Returns the spread by figure, for frameworks that are known and not. A run of a known
    framework from a source that is not here lies between those that its figures were set on and
    those of sources left out, and so does its spread."""
    tree: dict[str, Any] = {"level": LEVEL}
    for figure in FIGURES:
        within = _width(fitted, figure)
        unknown = _width(blind, figure)
        tree[figure] = {
            "fitted": round(within, 3),
            "known": round((within + unknown) / 2, 3),
            "unknown": round(unknown, 3),
        }
    return tree


def _width(score: Score, figure: Figure) -> float:
    """Returns the error, in natural logarithms, that so many of the counted cases stay within as
    the level says; 0 without."""
    errors = []
    for case in score.cases:
        if figure in case.errors_pct and not case.apart:
            error = abs(log1p(case.errors_pct[figure] / 100))
            errors.append((error, case.source))
    runs = Counter(source for _, source in errors)
    below = 0.0
    for error, source in sorted(errors):
        below += 1 / runs[source]
        if below >= LEVEL * len(runs):
            return error
    return 0.0

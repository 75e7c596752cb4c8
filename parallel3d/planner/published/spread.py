"""The spread of the planner's errors on published runs: what `model.spread` gives ranges by. Each
source counts as much as any other, however many runs it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import log1p, sqrt
from typing import Any

from parallel3d.planner.model.spread import FIGURES, LEVEL, Figure
from parallel3d.planner.published.score import Score, ScoredCase


def recorded_spread(
    fitted: Score, blind: Score, device_blind: Score, anchored: Score, *, without: str = ""
) -> dict[str, Any]:
    """Returns the spread by figure, for programs that are known and not, what is left of the latter
    where a run of the same cluster has anchored it, and that which a device adds whose efficiency
    was not set on runs. A run of a known program from a source that is not here lies between those
    that its figures were set on and those of sources left out, and so does its spread. `without`:
    the source whose runs do not count, because they are to be predicted."""

    def width(score: Score, figure: Figure) -> float:
        return _width((case for case in score.cases if case.source != without), figure)

    tree: dict[str, Any] = {"level": LEVEL}
    for figure in FIGURES:
        within = width(fitted, figure)
        unknown = width(blind, figure)
        found = {
            "fitted": within,
            "known": (within + unknown) / 2,
            "unknown": unknown,
            "anchored": 0.9 * width(anchored, figure) + 0.1 * unknown,
        }
        tree[figure] = {kind: round(each, 3) for kind, each in found.items()}
    same = {case.id: case.predicted.step_time_s for case in fitted.cases}
    pairs = zip(device_blind.cases, fitted.cases, strict=True)
    changed = [both for both in pairs if both[0].predicted.step_time_s != same[both[0].id]]
    unmeasured, measured = (
        _width((both[at] for both in changed if both[at].source != without), "throughput")
        for at in (0, 1)
    )
    tree["data_sheet"] = round(sqrt(max(0.0, unmeasured**2 - measured**2)), 3)
    return tree


def _width(cases: Iterable[ScoredCase], figure: Figure) -> float:
    """Returns the error, in natural logarithms, that so many of the counted cases stay within as
    the level says; 0 without."""
    errors = [
        (abs(log1p(case.errors_pct[figure] / 100)), case.source)
        for case in cases
        if figure in case.errors_pct and not case.apart
    ]
    runs = Counter(source for _, source in errors)
    below = 0.0
    for error, source in sorted(errors):
        below += 1 / runs[source]
        if below >= LEVEL * len(runs):
            return error
    return 0.0

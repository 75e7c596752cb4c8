"""The spread of the planner's errors on published runs, by what makes them larger: what `model.spread` gives ranges
by. Each source counts as much as any other, however many runs it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import log1p, sqrt
from typing import Any

from parallel3d.planner.model.spread import FIGURES, LEVEL, USUAL, Figure, groups_of
from parallel3d.planner.published.cases import CaseFile
from parallel3d.planner.published.score import Score, ScoredCase

_GROUPS = (USUAL, "many", "sharded_many", "float8")
_PRIOR_SOURCES = 4  # the spread of all counts as that of so many sources of a kind: few say little
_APART = ("", "float8")


def recorded_spread(
    file: CaseFile, fitted: Score, blind: Score, device_blind: Score, anchored: Score, *, without: str = ""
) -> dict[str, Any]:
    """Returns the spread by figure, for programs that are known and not, what is left of the latter where a run of the
    same cluster has anchored it, and that which a device adds whose efficiency was not set on runs. A run of a known
    program from a source that is not here lies between those that its figures were set on and those of sources left
    out, and so does its spread. `without`: the source whose runs do not count, because they are to be predicted."""
    counted = [case for case in file.cases if "duplicate" not in case.tags and case.source != without]
    groups = {case.id: {*groups_of(case.run)} or {USUAL} for case in counted}
    tree: dict[str, Any] = {"level": LEVEL}
    for figure in FIGURES:
        unknown, within = _by_group(blind, figure, groups), _by_group(fitted, figure, groups)
        known = {name: (width + within.get(name, width)) / 2 for name, width in unknown.items()}
        found = {"fitted": within, "known": known, "unknown": unknown, "anchored": _by_group(anchored, figure, groups)}
        tree[figure] = {kind: _rounded(widths) for kind, widths in found.items()}
    same = {case.id: case.predicted.step_time_s for case in fitted.cases}
    changed = [case for case in device_blind.cases if case.predicted.step_time_s != same.get(case.id)]
    of_changed = {case.id for case in changed if case.id in groups and not case.apart}
    unmeasured, measured = (
        _width([case for case in of.cases if case.id in of_changed], "throughput") for of in (device_blind, fitted)
    )
    tree["data_sheet"] = round(sqrt(max(0.0, unmeasured**2 - measured**2)), 3)
    return tree


def _by_group(score: Score, figure: Figure, groups: Mapping[str, set[str]]) -> dict[str, float]:
    cases = [case for case in score.cases if case.id in groups and case.apart in _APART and figure in case.errors_pct]
    found = {"all": _width([case for case in cases if not case.apart], figure)}
    for group in _GROUPS:
        of_group = [case for case in cases if group in groups[case.id] and (not case.apart or group == "float8")]
        if sources := len({case.source for case in of_group}):
            own, all_ = sources * _width(of_group, figure), _PRIOR_SOURCES * found["all"]
            found[group] = (own + all_) / (sources + _PRIOR_SOURCES)
    return found


def _width(cases: Iterable[ScoredCase], figure: Figure) -> float:
    """Returns the error, in natural logarithms, that so many of the cases stay within as the level says; 0 without."""
    errors = [(abs(log1p(case.errors_pct[figure] / 100)), case.source) for case in cases if figure in case.errors_pct]
    runs, below = Counter(source for _, source in errors), 0.0
    for error, source in sorted(errors):
        below += 1 / runs[source]
        if below >= LEVEL * len(runs):
            return error
    return 0.0


def _rounded(tree: Mapping[str, float]) -> dict[str, float]:
    return {name: round(width, 3) for name, width in tree.items()}

"""Formats the result of a comparison as text or as one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

from parallel3d.tools.check_layout.compare import LIMITS, Difference, LayoutComparison


def as_json(comparison: LayoutComparison) -> str:
    """Returns one JSON object: `same`, `layout`, `limits`, `steps`, `largest`, and
    `first_difference` (null if all agree). Missing and non-finite numbers are null."""
    first = comparison.first
    content = {
        "same": first is None,
        "layout": asdict(comparison.parallel),
        "limits": LIMITS,
        "steps": comparison.steps,
        "largest": comparison.largest,
        "first_difference": None if first is None else asdict(first),
    }
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2)


def as_text(comparison: LayoutComparison) -> str:
    """Returns one row per kind of value, then the first difference and its usual causes."""
    layout = comparison.parallel.label
    lines = [f"{layout} compared with one process, {comparison.steps} steps in float32", ""]
    for what, largest in comparison.largest.items():
        lines.append(f"{what:<15} differs by at most {largest:.1e}, limit {LIMITS[what]:g}")
    return "\n".join([*lines, "", *describe(comparison.first)])


def describe(first: Difference | None) -> Iterator[str]:
    """Yields lines about the first difference and its usual causes, or one line that all values
    agree."""
    if first is None:
        yield "the same model: every output, loss, gradient, norm and weight agrees"
        return
    when = f"in step {first.step}" if first.step else "before training"
    what = f"{first.what} of {first.name}" if first.name else first.what
    size = f"{first.size:.3g}" if math.isfinite(first.size) else "missing or not finite"
    limit = LIMITS[first.what]
    ranks = ", ".join(map(str, first.ranks))
    yield f"differs first {when}: {what}, by {size} (limit {limit:g}), on ranks {ranks}"
    yield "usual causes:"
    yield from (f"  - {cause}" for cause in first.causes)

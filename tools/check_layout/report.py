"""A comparison as a table, or as one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.compare import LIMITS, Difference, LayoutComparison

_MOST_NAMES = 4


def as_json(comparison: LayoutComparison) -> str:
    """Returns one object: `same`, `layout`, `limits`, `steps`, and `first_difference` (null if all
    agree). A number that is missing or not finite is null."""
    first = comparison.first
    content = {
        "same": first is None,
        "layout": asdict(comparison.parallel),
        "limits": LIMITS,
        "steps": [asdict(row) for row in comparison.rows],
        "first_difference": None if first is None else asdict(first),
    }
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2)


def as_text(comparison: LayoutComparison) -> str:
    """Returns a row for each step, then the first difference and its usual causes."""
    layout, steps = layout_name(comparison.parallel), len(comparison.rows)
    lines = [
        f"{layout} against one process, {steps} steps in float32; differences are relative",
        "",
        "step        loss  differs by        norm  differs by  gradients    weights",
    ]
    for row in comparison.rows:
        worst = {what: each.difference for what, each in row.worst.items()}
        lines.append(
            f"{row.step:>4}  {row.loss.reference:>10.6f}  {worst['loss']:>10.1e}  "
            f"{row.gradient_norm.reference:>10.6f}  {worst['gradient norm']:>10.1e}  "
            f"{worst['gradient']:>9.1e}  {worst['parameter']:>9.1e}"
        )
    return "\n".join([*lines, "", *describe(comparison.first)])


def layout_name(parallel: ParallelConfig) -> str:
    """Returns the axes of a layout as a product: `pp 2 x tp 2`."""
    sizes = [f"{axis} {size}" for axis, size in parallel.axes.items() if size > 1]
    return " x ".join(sizes) or "one process"


def describe(first: Difference | None) -> Iterator[str]:
    """Yields the lines of a first difference and its usual causes, or the one that says that there
    is none."""
    if first is None:
        yield "the same model: every output, loss, gradient, norm and weight agrees"
        return
    when = f"in step {first.step}" if first.step else "before training"
    what = f"{first.what} of {first.name}" if first.name else first.what
    size = f"{first.size:.3g}" if math.isfinite(first.size) else "missing or not finite"
    limit, ranks = LIMITS[first.what], ", ".join(map(str, first.ranks))
    yield f"differs first {when}: {what}, by {size} (limit {limit:g}), on ranks {ranks}"
    if first.also:
        more = len(first.also) - _MOST_NAMES
        names = ", ".join(first.also[:_MOST_NAMES])
        yield f"also: {names} and {more} more" if more > 0 else f"also: {names}"
    yield "usual causes:"
    yield from (f"  - {cause}" for cause in first.causes)

"""A comparison as a table for people, or as one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.compare import LIMITS, Difference, LayoutComparison

_MOST_NAMES = 4


def as_json(comparison: LayoutComparison) -> str:
    """Returns one object: `same`, `layout`, `limits`, `steps`, and `first_difference` (null where all agree). A size
    that is missing or not finite is null."""
    content = {
        "same": comparison.first is None,
        "layout": asdict(comparison.parallel),
        "limits": LIMITS,
        "steps": [
            {
                "step": row.step,
                "loss": {"reference": row.loss[0], "layout": row.loss[1]},
                "gradient_norm": {"reference": row.grad_norm[0], "layout": row.grad_norm[1]},
                "worst": {what: {"name": name, "difference": size} for what, (name, size) in row.worst.items()},
            }
            for row in comparison.rows
        ],
        "first_difference": None if comparison.first is None else asdict(comparison.first),
    }
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def as_text(comparison: LayoutComparison) -> str:
    """Returns a row for each step, then the first difference and its usual causes."""
    layout, steps = layout_name(comparison.parallel), len(comparison.rows)
    lines = [
        f"{layout} against one process, {steps} steps in float32; differences are relative",
        "",
        "step        loss  differs by        norm  differs by  gradients    weights",
    ]
    for row in comparison.rows:
        worst = {what: size for what, (_, size) in row.worst.items()}
        lines.append(
            f"{row.step:>4}  {row.loss[0]:>10.6f}  {worst['loss']:>10.1e}  {row.grad_norm[0]:>10.6f}  "
            f"{worst['gradient norm']:>10.1e}  {worst['gradient']:>9.1e}  {worst['parameter']:>9.1e}"
        )
    return "\n".join([*lines, "", *told(comparison.first)])


def layout_name(parallel: ParallelConfig) -> str:
    """Returns the axes of a layout as a product: `pp 2 x tp 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in parallel.axes.items() if size > 1) or "one process"


def told(first: Difference | None) -> Iterator[str]:
    """Yields the lines of a first difference and its usual causes, or the one that says that there is none."""
    if first is None:
        yield "the same model: every output, loss, gradient, norm and weight agrees"
        return
    when = f"in step {first.step}" if first.step else "before training"
    what = f"{first.what} of {first.name}" if first.name else first.what
    size = "missing or not finite" if not math.isfinite(first.size) else f"{first.size:.3g}"
    ranks = f"rank{'s' if len(first.ranks) > 1 else ''} {', '.join(map(str, first.ranks))}"
    yield f"differs first {when}: {what}, by {size} (limit {LIMITS[first.what]:g}), on {ranks}"
    if first.parameters and first.parameters != (first.name,):
        yield f"parameters: {_some(first.parameters)}"
    if first.also:
        yield f"also: {_some(first.also)}"
    if first.causes:
        yield "usual causes:"
        yield from (f"  - {cause}" for cause in first.causes)


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _finite(content: object) -> object:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, list | tuple) else content

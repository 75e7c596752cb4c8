"""A comparison as a table for people, or as one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.compare import LIMITS, Difference, LayoutComparison, StepRow

_MOST_NAMES = 4


def as_text(comparison: LayoutComparison, parallel: ParallelConfig) -> str:
    return "\n".join(_lines(comparison, parallel))


def as_json(comparison: LayoutComparison, parallel: ParallelConfig) -> str:
    """Returns one object: `same`, `layout`, `limits`, `steps`, and `first_difference` (null where all agree). A size
    that is missing or not finite is null."""
    content = {
        "same": comparison.first is None,
        "layout": asdict(parallel),
        "limits": LIMITS,
        "steps": [_step(row) for row in comparison.rows],
        "first_difference": None if comparison.first is None else asdict(comparison.first),
    }
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _lines(comparison: LayoutComparison, parallel: ParallelConfig) -> Iterator[str]:
    axes = " x ".join(f"{axis} {size}" for axis, size in parallel.axes.items() if size > 1) or "one process"
    yield f"{axes} against one process, {len(comparison.rows)} steps in float32; differences are relative"
    yield ""
    yield "step        loss  differs by        norm  differs by  gradients    weights"
    for row in comparison.rows:
        worst = {what: size for what, (_, size) in row.worst.items()}
        yield (
            f"{row.step:>4}  {row.loss[0]:>10.6f}  {worst['loss']:>10.1e}  {row.grad_norm[0]:>10.6f}  "
            f"{worst['gradient norm']:>10.1e}  {worst['gradient']:>9.1e}  {worst['parameter']:>9.1e}"
        )
    yield ""
    if comparison.first is None:
        yield "the same model: every output, loss, gradient, norm and weight agrees"
    else:
        yield from _told(comparison.first)


def _told(first: Difference) -> Iterator[str]:
    when = f"in step {first.step}" if first.step else "before training"
    what = {"": first.what}.get(first.name, f"{first.what} of {first.name}")
    size = "missing or not finite" if not math.isfinite(first.size) else f"{first.size:.3g}"
    yield f"differs first {when}: {what}, by {size} (limit {LIMITS[first.what]:g}), on {_ranks(first.ranks)}"
    if first.parameters and first.parameters != (first.name,):
        yield f"parameters: {_some(first.parameters)}"
    if first.also:
        yield f"also: {_some(first.also)}"
    if first.causes:
        yield "usual causes:"
        yield from (f"  - {cause}" for cause in first.causes)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _step(row: StepRow) -> dict[str, object]:
    return {
        "step": row.step,
        "loss": {"reference": row.loss[0], "layout": row.loss[1]},
        "gradient_norm": {"reference": row.grad_norm[0], "layout": row.grad_norm[1]},
        "worst": {what: {"name": name, "difference": size} for what, (name, size) in row.worst.items()},
    }


def _finite(content: object) -> object:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, list | tuple) else content

"""Turns the metrics of a run into the numbers and curves of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from parallel3d.reporting.read_metrics import (
    COUNTS,
    Metrics,
    Numbers,
    extremes,
    short,
)
from parallel3d.watch.step_clock import CAUSES

Tree = dict[str, Any]

EVALUATED = "evaluation: "  # Prefix of the curves of evaluation sets.
_CURVES = {
    "loss": ("loss",),
    "lr": ("lr",),
    "grad_norm": ("grad_norm",),
    "tokens_per_s": ("tokens_per_s",),
    "mfu": ("mfu",),
    "peak_memory": (
        "peak_memory_bytes",
        "peak_reserved_bytes",
    ),
    "experts": (
        "fullest_expert",
        "fullest_rank",
        "idle_experts",
    ),
    "time_s": CAUSES,
}
_MEMORY_KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "activations",
)
_MEDIANS = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
)
_LAST = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    *COUNTS,
)
_BUCKETS = 1500
_FEW_BUCKETS = 400  # For many columns, and for details.


def curves(metrics: Metrics) -> Tree:
    """Returns the curves to draw by name: steps `x`, and values `y` by key."""
    columns = metrics.columns
    steps = columns["step"]
    found = {}
    for name, keys in _CURVES.items():
        found[name] = _curve(steps, {key: columns[key] for key in keys})
    for name, losses in metrics.evaluations.items():
        pairs = np.array(sorted(losses.items()))
        found[EVALUATED + name] = _curve(pairs[:, 0], {"loss": pairs[:, 1]})
    # A step that is slow on one rank is slow on all of them, so the step time finds the extremes.
    peaks = [columns[key] for key in ("step_time_s", "peak_memory_bytes")]
    chosen = extremes(peaks, len(steps), _FEW_BUCKETS)
    spread, memory = {}, {}
    with suppress(TypeError, ValueError):  # Not numbers: the details are left out.
        rows = metrics.details(chosen, "time_spread_s")
        for cause in CAUSES:
            sides = np.array([row.get(cause) or (None, None) for row in rows], dtype=float)
            spread[f"{cause}/least"], spread[f"{cause}/most"] = sides.T
        rows = metrics.details(chosen, "memory_bytes")
        for kind in _MEMORY_KINDS:
            memory[kind] = np.array([row.get(kind) for row in rows], dtype=float)
    found["time_spread_s"] = _curve(steps[chosen], spread)
    found["memory_bytes"] = _curve(steps[chosen], memory)
    return {name: curve for name, curve in found.items() if curve["y"]}


def _curve(steps: Numbers, columns: Mapping[str, Numbers]) -> Tree:
    used = {key: values for key, values in columns.items() if np.isfinite(values).any()}
    at = extremes(used.values(), len(steps), _BUCKETS if len(used) < 4 else _FEW_BUCKETS)
    y = {key: short(values[at]) for key, values in used.items()}
    return {"x": steps[at].astype(int).tolist(), "y": y}


def numbers(metrics: Metrics, starts: Sequence[int]) -> Tree:
    """Returns the results of a run. Times and rates leave out the first line after each start,
    because it includes the start-up."""
    columns = metrics.columns
    steady = np.ones(len(metrics.offsets), dtype=bool)
    for step in starts:
        steady[np.searchsorted(columns["step"], step, side="right") :][:1] = False
    if not steady.any():
        steady[:] = True
    finite = {key: values[steady & np.isfinite(values)] for key, values in columns.items()}
    found = {key: columns[key][-1] for key in _LAST}
    for key in _MEDIANS:
        found[key] = np.median(finite[key]) if len(finite[key]) else math.nan
    peaks = columns["peak_memory_bytes"]
    measured = peaks[~np.isnan(peaks)]
    found["peak_memory_bytes"] = np.max(measured) if len(measured) else math.nan
    times: dict[str, float] = {}
    for cause in CAUSES:
        if len(finite[cause]):
            times[cause] = float(np.median(finite[cause]))
    if "checkpoint" in times:  # Few lines have a save, so their median would be 0.
        times["checkpoint"] = float(finite["checkpoint"].mean())
    return {**shortened(found), "time_s": shortened(times)}


def shortened(figures: Mapping[str, float]) -> dict[str, float | None]:
    return dict(zip(figures, short([*figures.values()]), strict=True))

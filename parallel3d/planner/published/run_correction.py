"""Scales of a cluster from runs that were made on it: what these took, over what is predicted of
them.

The time of a step is one number, and two are asked: the scale of arithmetic and that of the
network. A run that sends little tells of arithmetic alone, and runs that send more or less tell the
two apart. The logarithms of both are found by least squares with weights, among them the weights of
1 before any run, and once more from where that has led, because overlap makes a step not quite
linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

from parallel3d.planner.hardware.cluster import Scales, with_scales
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.step import step_cost

# Weights of a scale of 1 and of a run: one over the variance of a logarithm (docs/planner.md,
# "Anchored by a run").
_ARITHMETIC = 0.15**-2
_NETWORK = 0.5**-2
_MEMORY = 0.15**-2
_RUN = 0.1**-2
_ROUNDS = 4
_STEP = 0.02  # the difference that a slope is taken over


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that was made, as it is planned on its cluster without scales; what was not measured is
    None."""

    run: PlannedRun
    step_time_s: float | None = None
    memory_bytes: float | None = None
    memory_kind: MemoryKind = "device"


def scales_of(runs: Sequence[MeasuredRun]) -> Scales:
    """Returns the scales that the runs of one cluster show together."""
    timed = [(each.run, each.step_time_s) for each in runs if each.step_time_s is not None]
    weighed = [each for each in runs if each.memory_bytes is not None]
    arithmetic, network = _time_scales(timed)
    return Scales(
        arithmetic=arithmetic,
        network=network,
        memory=_memory_scale(weighed),
        timed=tuple(run.framework.name for run, _ in timed),
        weighed=tuple(each.run.framework.name for each in weighed),
    )


def _time_scales(timed: Sequence[tuple[PlannedRun, float]]) -> tuple[float, float]:
    """Returns the scales of arithmetic and of the network, by the normal equations of two
    unknowns."""
    x = y = 0.0  # their logarithms
    for _ in range(_ROUNDS):
        xx = _ARITHMETIC
        xy = 0.0
        yy = _NETWORK
        sum_x = 0.0
        sum_y = 0.0
        for run, step_time_s in timed:
            here = _log_time(run, x, y)
            slope_x = (_log_time(run, x + _STEP, y) - here) / _STEP
            slope_y = (_log_time(run, x, y + _STEP) - here) / _STEP
            off = log(step_time_s) - here + slope_x * x + slope_y * y
            xx += _RUN * slope_x**2
            xy += _RUN * slope_x * slope_y
            yy += _RUN * slope_y**2
            sum_x += _RUN * slope_x * off
            sum_y += _RUN * slope_y * off
        determinant = xx * yy - xy**2
        x = (yy * sum_x - xy * sum_y) / determinant
        y = (xx * sum_y - xy * sum_x) / determinant
    return exp(x), exp(y)


def _log_time(run: PlannedRun, arithmetic: float, network: float) -> float:
    scales = Scales(arithmetic=exp(arithmetic), network=exp(network))
    scaled = replace(run, cluster=with_scales(run.cluster, scales))
    return log(step_cost(scaled).step_time_s)


def _memory_scale(weighed: Sequence[MeasuredRun]) -> float:
    x = 0.0
    for _ in range(_ROUNDS):
        xx = _MEMORY
        sum_x = 0.0
        for each in weighed:
            here = _log_memory(each, x)
            slope = (_log_memory(each, x + _STEP) - here) / _STEP
            xx += _RUN * slope**2
            sum_x += _RUN * slope * (log(each.memory_bytes or 1) - here + slope * x)
        x = sum_x / xx
    return exp(x)


def _log_memory(each: MeasuredRun, memory: float) -> float:
    cluster = with_scales(each.run.cluster, Scales(memory=exp(memory)))
    fullest = worst_rank(replace(each.run, cluster=cluster))
    return log(fullest.of_kind(each.memory_kind))

"""`--measured`: corrects the predictions for a cluster with runs measured on it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import with_scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.published.run_correction import MeasuredRun, scales_of
from parallel3d.planner.search.request import PlanRequest
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.plan.compare import compare

# If the step time is off by a larger factor, the run must be from a different cluster. For an
# uncalibrated CPU, predictions are only accurate to an order of magnitude.
_MOST_OFF = 5.0
_MOST_OFF_OF_A_CPU = 50.0


def corrected_by_runs(
    request: PlanRequest, options: argparse.Namespace
) -> tuple[PlanRequest, list[str]]:
    """Returns the request with its cluster corrected by the runs of --measured, and a note on each
    run.

    Raises ConfigError if a run cannot be from this cluster.
    """
    runs = [_read(path, request) for path in options.measured]
    if not runs:
        return request, []
    cluster = with_scales(request.cluster, scales_of(runs))
    return replace(request, cluster=cluster), [_note(each) for each in runs]


def _note(measured: MeasuredRun) -> str:
    run = measured.run
    found = f"{measured.step_time_s:.3g} s per step ({step_cost(run).step_time_s:.3g} predicted)"
    if measured.memory_bytes is not None:
        counted = worst_rank(run).allocated / GIB
        found += f", {measured.memory_bytes / GIB:.3g} GiB ({counted:.3g} predicted)"
    return f"measured: {run.framework.name} on {run.layout.world_size} devices: {found}"


def _read(path: Path, request: PlanRequest) -> MeasuredRun:
    """Reads a run folder. Raises ConfigError if the run cannot be from the request's cluster."""
    try:
        found = compare(path, request.cluster)
    except ConfigError as problem:
        raise ConfigError(f"--measured {problem}") from problem
    device = request.cluster.device
    name = f"--measured {path}: the run was not on {device.name}"
    if found.other_device is not None:
        raise ConfigError(f"{name} ({found.other_device}); plan for the device that it ran on")
    off = found.measured.step_time_s / found.cost.step_time_s
    is_guess = device.is_cpu and request.cluster.measured is None
    most = _MOST_OFF_OF_A_CPU if is_guess else _MOST_OFF
    if not 1 / most <= off <= most or found.cost.mfu / off >= 1:
        raise ConfigError(f"{name}: its steps take {off:.3g} times as long as predicted")
    return found.measured_run

"""How far off a prediction may be: ranges that hold the truth in eight cases of ten, by the errors
on published runs whose source was left out, and the chance that a layout fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, hypot, log, log2
from statistics import NormalDist
from typing import Any, Literal

from parallel3d.planner.hardware.framework import FrameworkProfile
from parallel3d.planner.model.planned_run import PlannedRun

Figure = Literal["throughput", "memory"]
FIGURES: tuple[Figure, ...] = ("throughput", "memory")
LEVEL = 0.8  # the share of predictions whose truth lies within its range
# Half the width of the range of a run's speed, in natural logarithms, and what adds to it as the
# root of a sum of squares. Set so that the ranges hold 80% of the runs of tools/cases and 80% of
# their sources.
SPEED = 0.15
WIDE_SHARDING = 0.15  # for each doubling of the ranks that share a parameter, beyond 64
DATA_SHEET = 0.2  # a device with fewer than so many published runs here:
ENOUGH_RUNS = 3
FLOAT8 = 0.2  # of speed, and of memory
MOE = 0.25
MEMORY = 0.2
# This project's own memory is counted from its own code (docs/how-to/plan.md: never 3% below).
OWN_MEMORY = 0.07
# The speed of a CPU that was not calibrated is known to an order of magnitude, because its ranks
# share cores that nothing here counts.
ANY_CPU = log(10)
# on a calibrated host, and if a run of the same framework on the same cluster has corrected it
CALIBRATED = 0.12
CORRECTED = 0.095
CORRECTED_MEMORY = 0.138


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure's range, which holds the truth with the chance `level`."""

    low: float
    high: float
    level: float = LEVEL


@dataclass(frozen=True, kw_only=True)
class ErrorModel:
    """Half the width of the range of a run's speed, and of its memory, in natural logarithms."""

    throughput: float
    memory: float

    def around(self, figure: Figure, value: float) -> Interval:
        """Returns the range of a figure that grows with the speed (or its inverse), or with the
        memory."""
        factor = exp(getattr(self, figure))
        return Interval(low=value / factor, high=value * factor)

    def chance_to_fit(self, needed_bytes: float, limit_bytes: float) -> float:
        """Returns the chance that what is predicted to need so much stays within the limit."""
        return NormalDist(sigma=_deviation(self.memory)).cdf(log(limit_bytes / needed_bytes))


def error_model_of(run: PlannedRun, recorded: Mapping[str, Any]) -> ErrorModel:
    """Returns the ranges of a run. `recorded`: the accuracy with the devices of published runs
    (accuracy.json)."""
    framework = run.framework
    cluster = run.cluster
    is_calibrated = framework.is_parallel3d and cluster.measured is not None
    runs = recorded["runs_by_hardware"].get(cluster.device_file, 0)
    speed = SPEED
    if is_calibrated:
        speed = CALIBRATED
    elif cluster.device.is_cpu:
        speed = ANY_CPU
    elif framework.name in cluster.scales.timed:
        speed = CORRECTED
    elif runs < ENOUGH_RUNS:
        speed = hypot(SPEED, DATA_SHEET)
    is_float8 = run.precision == "fp8"
    is_mixture = run.shape.experts is not None
    more = [WIDE_SHARDING * max(0.0, log2(run.layout.parameter_shards / 64))]
    if is_float8:
        more.append(FLOAT8)
    if is_mixture:
        more.append(MOE)
    memory = memory_spread(
        framework,
        is_mixture=is_mixture,
        is_float8=is_float8,
        is_corrected=framework.name in cluster.scales.weighed,
    )
    return ErrorModel(throughput=hypot(speed, *more), memory=memory)


def memory_spread(
    framework: FrameworkProfile,
    *,
    is_mixture: bool = False,
    is_float8: bool = False,
    is_corrected: bool = False,
) -> float:
    """Returns the half width of the range of memory, which no layout changes. `is_corrected`: a run
    of the framework on this cluster has corrected it."""
    width = MEMORY
    if framework.is_parallel3d and not is_mixture:
        width = OWN_MEMORY
    if is_float8:
        width = hypot(width, FLOAT8)
    if is_corrected:
        return min(width, CORRECTED_MEMORY)
    return width


def safe_share(memory: float, risk: float) -> float:
    """Returns the share of a device that a layout may be predicted to need, so that it does not fit
    with this risk."""
    return exp(-NormalDist().inv_cdf(1 - risk) * _deviation(memory))


def _deviation(half_width: float) -> float:
    return half_width / NormalDist().inv_cdf((1 + LEVEL) / 2)

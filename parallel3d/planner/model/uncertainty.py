"""Ranges that should cover the true value in 80% of cases, and the probability that a layout fits.
They come from errors on published runs with each source held out."""

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
LEVEL = 0.8  # Probability that a range covers the true value.
# Half the width of the range of a run's speed in natural logarithms, and terms that add to it as
# root sum of squares. They are set so that ranges cover 80% of the runs of tools/cases and 80% of
# their sources.
SPEED = 0.15
WIDE_SHARDING = 0.15  # Added per doubling of the ranks that share a parameter, beyond 64 ranks.
DATA_SHEET = 0.2  # Added for a device with fewer than ENOUGH_RUNS published runs.
ENOUGH_RUNS = 3
FLOAT8 = 0.2  # Added for FP8, to the range of speed and to that of memory.
MOE = 0.25
MEMORY = 0.2
# Memory of parallel3d follows from its code and is never underestimated by more than 3%.
OWN_MEMORY = 0.07
# The speed of an uncalibrated CPU is known only to an order of magnitude, because the number of
# shared cores is unknown.
ANY_CPU = log(10)
# For parallel3d on a calibrated host, and for a cluster corrected by a run of the same framework.
# CORRECTED_MEMORY is an upper limit.
CALIBRATED = 0.12
CORRECTED = 0.095
CORRECTED_MEMORY = 0.138


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range that should cover the true value with probability `level`."""

    low: float
    high: float
    level: float = LEVEL


@dataclass(frozen=True, kw_only=True)
class ErrorModel:
    """Half-widths of the prediction intervals of speed and memory, in natural logarithms."""

    throughput: float
    memory: float

    def around(self, figure: Figure, value: float) -> Interval:
        """Returns the range around a value that is proportional to `figure` or to its inverse."""
        factor = exp(getattr(self, figure))
        return Interval(low=value / factor, high=value * factor)

    def chance_to_fit(self, needed_bytes: float, limit_bytes: float) -> float:
        """Returns the probability that a layout with this predicted memory stays within the
        limit."""
        return NormalDist(sigma=_deviation(self.memory)).cdf(log(limit_bytes / needed_bytes))


def error_model_of(run: PlannedRun, recorded: Mapping[str, Any]) -> ErrorModel:
    """Returns the error model of a run. `recorded` is the content of accuracy.json."""
    framework = run.framework
    cluster = run.cluster
    runs = recorded["runs_by_hardware"].get(cluster.device_file, 0)
    speed = SPEED
    if framework.is_parallel3d and cluster.measured is not None:
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
    return ErrorModel(
        throughput=hypot(speed, *more),
        memory=memory_spread(
            framework,
            is_mixture=is_mixture,
            is_float8=is_float8,
            is_corrected=framework.name in cluster.scales.weighed,
        ),
    )


def memory_spread(
    framework: FrameworkProfile,
    *,
    is_mixture: bool = False,
    is_float8: bool = False,
    is_corrected: bool = False,
) -> float:
    """Returns half the width of the memory range.

    `is_corrected` is True if a run of the framework on this cluster corrected the estimate.
    """
    width = MEMORY
    if framework.is_parallel3d and not is_mixture:
        width = OWN_MEMORY
    if is_float8:
        width = hypot(width, FLOAT8)
    if is_corrected:
        return min(width, CORRECTED_MEMORY)
    return width


def safe_share(memory: float, risk: float) -> float:
    """Returns the largest fraction of a device's memory that a layout may be predicted to need, so
    that the probability of running out of memory is at most `risk`.
    """
    return exp(-NormalDist().inv_cdf(1 - risk) * _deviation(memory))


def _deviation(half_width: float) -> float:
    return half_width / NormalDist().inv_cdf((1 + LEVEL) / 2)

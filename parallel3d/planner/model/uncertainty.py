"""How far off a prediction may be: ranges that hold the truth in so many cases of ten, from the
recorded errors on published runs, and the chance that a layout fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import NormalDist
from typing import Any, Literal

from parallel3d.planner.hardware.framework import FrameworkProfile
from parallel3d.planner.model.planned_run import PlannedRun

Figure = Literal["throughput", "memory"]
FIGURES: tuple[Figure, ...] = ("throughput", "memory")
# Of mixtures, and of parameters that are sharded over more than MANY devices: set on the errors of
# their runs (docs/planner.md).
MIXTURES = 0.33
SHARDED_MANY = 0.37
MANY = 128
# The speed of a CPU that was not calibrated is known to an order of magnitude, and where a run
# there has corrected it to a factor of 2, because its ranks share cores that nothing here counts.
ANY_CPU = log(10)
ANCHORED_CPU = log(2)
# What a device adds whose efficiency is from its data sheet, and what is left where a run of the
# same framework on the same cluster has corrected the prediction.
DATA_SHEET = 0.093
ANCHORED = 0.095
ANCHORED_MEMORY = 0.138
LEVEL = 0.8  # the share of predictions whose truth lies within its range


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
    """Returns the spread of a run by the recorded accuracy: for a framework that is known or not,
    and for a device whose efficiency is from its data sheet."""
    framework = run.framework
    cluster = run.cluster
    errors = recorded["spread"]["throughput"]
    is_calibrated = cluster.measured is not None
    is_mixture = run.shape.experts is not None
    is_known = framework.is_measured or (framework.is_parallel3d and is_calibrated)
    speed = errors["known" if is_known else "unknown"]
    is_any_cpu = cluster.device.is_cpu and not is_calibrated
    if is_any_cpu:
        speed = ANY_CPU
    elif cluster.device_file not in recorded["runs_by_hardware"] and not is_calibrated:
        speed = hypot(speed, DATA_SHEET)
    if framework.name in cluster.scales.timed:
        speed = min(speed, ANCHORED_CPU if is_any_cpu else ANCHORED)
    if is_mixture:
        speed = max(speed, MIXTURES)
    if run.layout.parameter_shards > MANY:
        speed = max(speed, SHARDED_MANY)
    is_anchored = framework.name in cluster.scales.weighed
    memory = memory_spread(framework, recorded, is_mixture=is_mixture, is_anchored=is_anchored)
    return ErrorModel(throughput=speed, memory=memory)


def memory_spread(
    framework: FrameworkProfile,
    recorded: Mapping[str, Any],
    *,
    is_mixture: bool = False,
    is_anchored: bool = False,
) -> float:
    """Returns the spread of memory, which no layout changes. That of this project's own framework
    is counted from its own code, as that of frameworks which were fitted to their runs; no run says
    how much memory a mixture takes. Where a run of the framework on this cluster has corrected it
    (`is_anchored`), it is at most as wide as such runs leave it."""
    errors = recorded["spread"]["memory"]
    kind = "unknown"
    if framework.is_parallel3d:
        kind = "fitted"
    elif framework.is_measured and not is_mixture:
        kind = "known"
    width: float = errors[kind]
    if is_anchored:
        return min(width, ANCHORED_MEMORY)
    return width


def safe_share(memory: float, risk: float) -> float:
    """Returns the share of a device that a layout may be predicted to need, so that it does not fit
    with this risk."""
    return exp(-NormalDist().inv_cdf(1 - risk) * _deviation(memory))


def _deviation(half_width: float) -> float:
    return half_width / NormalDist().inv_cdf((1 + LEVEL) / 2)

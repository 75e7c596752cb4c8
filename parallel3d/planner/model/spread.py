"""How far off a prediction may be: ranges that hold the truth in so many cases of ten, from the recorded errors on
published runs, and the chance that a layout fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import NormalDist
from typing import Any, Literal

from parallel3d.planner.hardware.program import TrainingProgram
from parallel3d.planner.model.planned_run import PlannedRun

Figure = Literal["throughput", "memory"]
FIGURES: tuple[Figure, ...] = ("throughput", "memory")
MANY = 128  # devices beyond which networks differ more than this planner knows
# Of mixtures, set on none of their runs: the errors on those of docs/planner.md, "Mixtures of experts".
MIXTURES = 0.33
# The speed of a CPU that was not calibrated is known to an order of magnitude, and where a run there has corrected it
# to a factor of 2, because its ranks share cores that nothing here counts.
ANY_CPU, ANCHORED_CPU = log(10), log(2)
USUAL = "usual"  # the kind of runs that are of no other: what makes errors larger widens no range but its own
LEVEL = 0.8  # the share of predictions whose truth lies within its range


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure's range, which holds the truth with the chance `level`."""

    low: float
    high: float
    level: float = LEVEL


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Half the width of the range of a run's speed, and of its memory, in natural logarithms."""

    throughput: float
    memory: float

    def around(self, figure: Figure, value: float) -> Interval:
        """Returns the range of a figure that grows with the speed (or its inverse), or with the memory."""
        factor = exp(getattr(self, figure))
        return Interval(low=value / factor, high=value * factor)

    def chance_to_fit(self, needed_bytes: float, limit_bytes: float) -> float:
        """Returns the chance that what is predicted to need so much stays within the limit."""
        return NormalDist(sigma=_deviation(self.memory)).cdf(log(limit_bytes / needed_bytes))


def groups_of(run: PlannedRun) -> list[str]:
    """Returns the kinds of runs, beside all, that a run is of and whose errors are recorded for themselves."""
    return _groups(run.layout.world_size, run.layout.parameter_shards, run.precision)


def _groups(devices: int, parameter_shards: int, precision: str) -> list[str]:
    kinds = {"float8": precision == "fp8", "many": devices > MANY, "sharded_many": parameter_shards > MANY}
    return [kind for kind, is_so in kinds.items() if is_so]


def spread_of(run: PlannedRun, recorded: Mapping[str, Any]) -> Spread:
    """Returns the spread of a run by the recorded accuracy: for a program that is known or not, the widest of the kinds
    that the run is of, and beside it that of a device whose efficiency is from its data sheet."""
    program, cluster, errors = run.program, run.cluster, recorded["spread"]["throughput"]
    is_known = program.is_measured or (program.is_parallel3d and cluster.measured is not None)
    speed = _widest(errors["known" if is_known else "unknown"], groups_of(run))
    is_any_cpu = cluster.device.is_cpu and cluster.measured is None
    if is_any_cpu:
        speed = ANY_CPU
    elif cluster.device_file not in recorded["runs_by_hardware"] and cluster.measured is None:
        speed = hypot(speed, recorded["spread"]["data_sheet"])
    if program.name in cluster.scales.timed:
        speed = min(speed, ANCHORED_CPU if is_any_cpu else _widest(errors["anchored"], groups_of(run)))
    if run.shape.experts is not None:
        speed = max(speed, MIXTURES)
    memory = memory_spread(
        program,
        run.layout.world_size,
        run.precision,
        recorded,
        is_mixture=run.shape.experts is not None,
        is_anchored=program.name in cluster.scales.weighed,
    )
    return Spread(throughput=speed, memory=memory)


def _widest(errors: Mapping[str, float], groups: Iterable[str]) -> float:
    widths = [errors[group] for group in groups if group in errors]
    return max(widths) if widths else errors.get(USUAL, errors["all"])


def memory_spread(
    program: TrainingProgram,
    devices: int,
    precision: str,
    recorded: Mapping[str, Any],
    *,
    is_mixture: bool = False,
    is_anchored: bool = False,
) -> float:
    """Returns the spread of memory, which no layout changes. That of this project's own program is counted from its own
    code, as that of programs which were fitted to their runs; no run says how much memory a mixture takes. Where a run
    of the program on this cluster has corrected it (`is_anchored`), it is at most as wide as such runs leave it."""
    errors, is_known = recorded["spread"]["memory"], program.is_measured and not is_mixture
    kinds = ["fitted" if program.is_parallel3d else "known" if is_known else "unknown", *["anchored"] * is_anchored]
    return min(_widest(errors[kind], _groups(devices, 1, precision)) for kind in kinds)


def safe_share(memory: float, risk: float) -> float:
    """Returns the share of a device that a layout may be predicted to need, so that it does not fit with this risk."""
    return exp(-NormalDist().inv_cdf(1 - risk) * _deviation(memory))


def _deviation(half_width: float) -> float:
    return half_width / NormalDist().inv_cdf((1 + LEVEL) / 2)

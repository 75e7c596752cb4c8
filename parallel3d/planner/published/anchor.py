"""Scales of a cluster from runs that were made on it: what these took, over what is predicted of
them.

The time of a step is one number, and two are asked: the scale of arithmetic and that of the
network. A run that sends little tells of arithmetic alone, and runs that send more or less tell the
two apart. The logarithms of both are found by least squares with weights, among them the weights of
1 before any run, and once more from where that has led, because overlap makes a step not quite
linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from parallel3d.planner.hardware.cluster import Scales, with_scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.cases import CaseFile, MeasuredRank, PublishedCase
from parallel3d.planner.published.score import measured_bytes, predict_case
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
    memory_rank: MeasuredRank = "worst"


def scales_of(runs: Sequence[MeasuredRun]) -> Scales:
    """Returns the scales that the runs of one cluster show together."""
    timed = [(each.run, each.step_time_s) for each in runs if each.step_time_s is not None]
    weighed = [each for each in runs if each.memory_bytes is not None]
    arithmetic, network = _time_scales(timed)
    return Scales(
        arithmetic=arithmetic,
        network=network,
        memory=_memory_scale(weighed),
        timed=tuple(run.program.name for run, _ in timed),
        weighed=tuple(each.run.program.name for each in weighed),
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
    return log(step_cost(replace(run, cluster=with_scales(run.cluster, scales))).step_time_s)


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
    ranks = memory_by_rank(replace(each.run, cluster=cluster))
    return log(measured_bytes(ranks, each.memory_rank, each.memory_kind))


def anchored_cases(file: CaseFile) -> tuple[CaseFile, CaseFile]:
    """Returns the cases without those that anchor the others, as they are and on anchored clusters.
    One run of each source on each device anchors: the median by devices of those whose speed and
    memory are both measured, or one for each of the two where no run has both."""
    clusters: dict[tuple[str, str], list[PublishedCase]] = defaultdict(list)
    for case in file.cases:
        clusters[case.source, case.run.cluster.device_file].append(case)
    rest: list[PublishedCase] = []
    anchored: list[PublishedCase] = []
    for cases in clusters.values():
        anchors = _anchors(cases)
        scales = scales_of([_measured(case) for case in anchors])
        for case in cases:
            if case not in anchors:
                cluster = with_scales(case.run.cluster, scales)
                rest.append(case)
                anchored.append(replace(case, run=replace(case.run, cluster=cluster)))
    return replace(file, cases=tuple(rest)), replace(file, cases=tuple(anchored))


def _anchors(cases: Iterable[PublishedCase]) -> list[PublishedCase]:
    """Returns the runs that anchor a source's cluster."""
    usable = [case for case in cases if not case.apart and "duplicate" not in case.tags]
    usable.sort(key=lambda case: case.run.layout.world_size)
    timed = [case for case in usable if case.measured.metric is not None]
    weighed = [case for case in usable if case.measured.memory_gib is not None]
    both = [case for case in timed if case in weighed]
    return [each[len(each) // 2] for each in ([both] if both else [timed, weighed]) if each]


def _measured(case: PublishedCase) -> MeasuredRun:
    said = case.measured
    step_s = None
    if said.metric is not None:
        predicted = predict_case(case)
        step_s = said.step_time_s
        if said.metric != "step_time_s":
            slower = getattr(predicted, said.metric) / getattr(said, said.metric)
            step_s = predicted.step_time_s * slower
    return MeasuredRun(
        run=case.run,
        step_time_s=step_s,
        memory_bytes=None if said.memory_gib is None else said.memory_gib * GIB,
        memory_kind=said.memory_kind or "device",
        memory_rank=case.memory_rank,
    )

"""Scales of a cluster from runs that were made on it: what these took, over what is predicted of them.

The time of a step is one number, and two are asked: the scale of arithmetic and that of the network. Both are unsure
before any run, and a step's time is shared between them by how much each moves it and how unsure each is: a run that
sends little tells of arithmetic alone, and runs that send more or less tell the two apart. This is ridge regression in
logarithms, run after run in closed form (a Kalman filter without motion), and once more from where it has led, because
overlap makes a step not quite linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Literal, NamedTuple

from parallel3d.planner.hardware.cluster import Scales, with_scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.cases import CaseFile, MeasuredRank, PublishedCase
from parallel3d.planner.published.score import measured_bytes, predict_case
from parallel3d.planner.time.step import step_cost

# How unsure the logarithm of each scale is before any run (docs/planner.md, "Anchored by a run"), and how far a run is
# from what its cluster's scales say of it.
_UNSURE = {"arithmetic": 0.15, "network": 0.5, "memory": 0.15}
_OF_A_RUN = 0.1
_ROUNDS = 4
_STEP = 0.02  # the difference that a slope is taken over


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that was made, as it is planned on its cluster without scales; what was not measured is None."""

    run: PlannedRun
    step_time_s: float | None = None
    memory_bytes: float | None = None
    memory_kind: MemoryKind = "device"
    memory_rank: MeasuredRank = "worst"


class _MeasuredFigure(NamedTuple):
    """One figure of a run, which is either of its step or of its memory."""

    of: MeasuredRun
    what: Literal["time", "memory"]
    said: float

    def slopes(self, logs: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Returns the logarithm of the prediction with these scales, and how much each scale moves it."""
        here, moved = self._predicted(logs), {}
        for name in ("memory",) if self.what == "memory" else ("arithmetic", "network"):
            moved[name] = (self._predicted({**logs, name: logs[name] + _STEP}) - here) / _STEP
        return here, moved

    def _predicted(self, logs: Mapping[str, float]) -> float:
        scales = _scales(logs)
        run = replace(self.of.run, cluster=with_scales(self.of.run.cluster, scales))
        if self.what == "time":
            return log(step_cost(run).step_time_s)
        return log(measured_bytes(memory_by_rank(run), self.of.memory_rank, self.of.memory_kind))


def scales_of(runs: Sequence[MeasuredRun]) -> Scales:
    """Returns the scales that the runs of one cluster show together."""
    figures = [*_figures(runs)]
    logs = dict.fromkeys(_UNSURE, 0.0)
    for _ in range(_ROUNDS):
        found = dict.fromkeys(_UNSURE, 0.0)
        unsure = {a: {b: width**2 * (a == b) for b in _UNSURE} for a, width in _UNSURE.items()}
        for figure in figures:
            here, slopes = figure.slopes(logs)
            moves = {a: sum(slope * row[b] for b, slope in slopes.items()) for a, row in unsure.items()}
            variance = sum(slope * moves[name] for name, slope in slopes.items()) + _OF_A_RUN**2
            off = log(figure.said) - here - sum(slope * (found[name] - logs[name]) for name, slope in slopes.items())
            found = {name: value + moves[name] * off / variance for name, value in found.items()}
            unsure = {a: {b: v - moves[a] * moves[b] / variance for b, v in row.items()} for a, row in unsure.items()}
        logs = found
    timed, weighed = (
        tuple(each.of.run.program.name for each in figures if each.what == what) for what in ("time", "memory")
    )
    return replace(_scales(logs), timed=timed, weighed=weighed)


def _scales(logs: Mapping[str, float]) -> Scales:
    return Scales(arithmetic=exp(logs["arithmetic"]), network=exp(logs["network"]), memory=exp(logs["memory"]))


def _figures(runs: Iterable[MeasuredRun]) -> Iterator[_MeasuredFigure]:
    for each in runs:
        if each.step_time_s is not None:
            yield _MeasuredFigure(each, "time", each.step_time_s)
        if each.memory_bytes is not None:
            yield _MeasuredFigure(each, "memory", each.memory_bytes)


def anchored_cases(file: CaseFile) -> tuple[CaseFile, CaseFile]:
    """Returns the cases without those that anchor the others, as they are and on anchored clusters. One run of each
    source on each device anchors: the median by devices of those whose speed and memory are both measured, or one for
    each of the two where no run has both."""
    clusters: dict[tuple[str, str], list[PublishedCase]] = defaultdict(list)
    for case in file.cases:
        clusters[case.source, case.run.cluster.device_file].append(case)
    rest: list[PublishedCase] = []
    anchored: list[PublishedCase] = []
    for cases in clusters.values():
        anchors = _anchors(cases)
        scales = scales_of([*anchors.values()])
        left = [case for case in cases if case.id not in anchors]
        rest += left
        anchored += [
            replace(case, run=replace(case.run, cluster=with_scales(case.run.cluster, scales))) for case in left
        ]
    return replace(file, cases=tuple(rest)), replace(file, cases=tuple(anchored))


def _anchors(cases: Iterable[PublishedCase]) -> dict[str, MeasuredRun]:
    """Returns the runs that anchor a source's cluster, by id."""
    usable = [case for case in cases if not case.apart and "duplicate" not in case.tags]
    usable.sort(key=lambda case: case.run.layout.world_size)
    timed = [case for case in usable if case.measured.metric is not None]
    weighed = [case for case in usable if case.measured.memory_gib is not None]
    both = [case for case in timed if case in weighed]
    chosen = [each[len(each) // 2] for each in ([both] if both else [timed, weighed]) if each]
    return {case.id: _measured(case) for case in chosen}


def _measured(case: PublishedCase) -> MeasuredRun:
    said, step_s = case.measured, None
    if said.metric is not None:
        predicted = predict_case(case)
        ratio = getattr(predicted, said.metric) / getattr(said, said.metric)
        step_s = predicted.step_time_s * (1 / ratio if said.metric == "step_time_s" else ratio)
    return MeasuredRun(
        run=case.run,
        step_time_s=step_s,
        memory_bytes=None if said.memory_gib is None else said.memory_gib * GIB,
        memory_kind=said.memory_kind or "device",
        memory_rank=case.memory_rank,
    )

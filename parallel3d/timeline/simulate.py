"""What a schedule takes: each action's start and end, from how long each kind takes on each stage. No torch here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from parallel3d.schedules.check import in_order
from parallel3d.schedules.schedule import Kind, Schedule
from parallel3d.timeline.spans import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What one stage takes for one microbatch, in any unit that all share. The whole backward is its own number, since
    it may cost less than its two halves; None: their sum."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    full_backward: float | None = None

    @property
    def backward(self) -> float:
        return self.input + self.weight if self.full_backward is None else self.full_backward


EQUAL = StageTimes()  # the papers' assumption


@dataclass(frozen=True, kw_only=True)
class ActionTimes:
    """How long everything takes. `transfers[s]` is the way between stages s and s + 1, up or down: it delays the taker
    and keeps no rank from computing. Between stages on one rank nothing is transferred."""

    stages: tuple[StageTimes, ...]
    transfers: tuple[float, ...]

    @classmethod
    def uniform(cls, stages: int, times: StageTimes = EQUAL, *, transfer: float = 0.0) -> ActionTimes:
        """The same for all stages."""
        return cls(stages=(times,) * stages, transfers=(transfer,) * (stages - 1))


def simulate(schedule: Schedule, costs: ActionTimes) -> Timeline:
    """Each rank does its actions in order, each as soon as what it takes is there. Raises ScheduleError where the
    schedule stops before its end (see `check_schedule`, which it is to have passed)."""
    stages, microbatches = schedule.stages, schedule.microbatches
    if len(costs.stages) != stages or len(costs.transfers) != max(0, stages - 1):
        raise ValueError(f"costs of {len(costs.stages)} stages for a schedule of {stages}")
    ways = _ways(schedule.placement, costs.transfers)
    takes = {
        Kind.FORWARD: [times.forward for times in costs.stages],
        Kind.BACKWARD: [times.backward for times in costs.stages],
        Kind.INPUT: [times.input for times in costs.stages],
        Kind.WEIGHT: [times.weight for times in costs.stages],
    }
    # When what an action takes is there, by stage x microbatches + microbatch; the model's own input always is.
    inputs, gradients = [0.0] * ((stages + 1) * microbatches), [0.0] * (stages * microbatches)
    clocks = [0.0] * len(schedule.ranks)
    spans = []
    for rank, action in in_order(schedule):
        stage, kind, microbatch = action
        place = stage * microbatches + microbatch
        start = clocks[rank]
        if kind is Kind.FORWARD:
            start = max(start, inputs[place])
            end = start + takes[kind][stage]
            inputs[place + microbatches] = end + ways[stage + 1]
        elif kind is Kind.WEIGHT:  # its first half is an earlier action of the same rank
            end = start + takes[kind][stage]
        else:
            start = max(start, gradients[place])
            end = start + takes[kind][stage]
            if stage > 0:
                gradients[place - microbatches] = end + ways[stage]
        clocks[rank] = end
        spans.append(Span(rank, action, start, end))
    return Timeline(name=schedule.name, ranks=len(schedule.ranks), stages=stages, spans=tuple(spans))


def _ways(placement: Sequence[int], transfers: Sequence[float]) -> list[float]:
    """The cost of the way between stages s - 1 and s, at s; nothing at both ends."""
    between = zip(placement[:-1], placement[1:], transfers, strict=True)
    return [0.0, *(0.0 if one == other else cost for one, other, cost in between), 0.0]


def measured_costs(schedule: Schedule, spans: Sequence[Span]) -> ActionTimes:
    """The median time of each kind of action on each stage; transfers cost nothing, which the difference then shows."""
    times: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        times[span.action.stage, span.action.kind].append(span.end_s - span.start_s)

    def usual(stage: int, kind: Kind) -> float:
        return median(times[stage, kind]) if (stage, kind) in times else 0.0

    stages = [
        StageTimes(
            forward=usual(stage, Kind.FORWARD),
            input=usual(stage, Kind.INPUT),
            weight=usual(stage, Kind.WEIGHT),
            full_backward=usual(stage, Kind.BACKWARD),
        )
        for stage in range(schedule.stages)
    ]
    return ActionTimes(stages=tuple(stages), transfers=(0.0,) * (schedule.stages - 1))

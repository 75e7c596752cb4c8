"""How long a schedule takes: each action's start and end, from how long each kind takes on each
stage. No torch here.

Ranks do their actions in order, each as soon as its input is there. So one order of all actions
that agrees with every rank's own holds for any times: it is found once (`action_order`), and a
simulation is one pass over it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.timeline.spans import Span, Timeline

_CODES = {kind: code for code, kind in enumerate(Kind)}


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What one stage takes for one microbatch, in any one unit. The whole backward has its own
    number, because it may cost less than its two halves; None stands for their sum."""

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
    """How long everything takes. `transfers[s]` is the way between stages s and s + 1, up or down:
    it delays the action that takes the result and keeps no rank from computing. Between two stages
    of one rank nothing is transferred."""

    stages: tuple[StageTimes, ...]
    transfers: tuple[float, ...]

    @cached_property
    def durations(self) -> list[float]:
        """How long every kind of action takes on every stage, at 4 x stage + kind."""
        found: list[float] = []
        for stage in self.stages:
            found += (stage.forward, stage.backward, stage.input, stage.weight)
        return found

    @classmethod
    def uniform(
        cls, stages: int, times: StageTimes = EQUAL, *, transfer: float = 0.0
    ) -> ActionTimes:
        """Makes the times of stages that all take the same."""
        return cls(stages=(times,) * stages, transfers=(transfer,) * (stages - 1))


@dataclass(frozen=True)
class ActionOrder:
    """A schedule's actions, each after the actions that it needs. `steps` are the same as numbers:
    rank, duration (4 x stage + kind), the slots of the results that the action takes and makes, and
    the way of what it makes (the stage at the way's upper end; 0 and the number of stages stand for
    no way)."""

    schedule: Schedule
    actions: Sequence[Action]
    steps: Sequence[tuple[int, int, int, int, int]]


def action_order(schedule: Schedule) -> ActionOrder:
    """Returns the order in which a schedule is simulated. Raises ScheduleError if the schedule
    stops before its end (see `check_schedule`, which it is to have passed)."""
    actions = []
    steps = []
    for rank, action, takes, makes in schedule.in_order():
        code = _CODES[action.kind]
        way = action.stage + 1 if code == 0 else action.stage
        actions.append(action)
        steps.append((rank, 4 * action.stage + code, takes, makes, way))
    return ActionOrder(schedule, actions, steps)


def action_starts(order: ActionOrder, times: ActionTimes) -> tuple[list[float], float]:
    """Returns when each step of an order starts, and when the last one ends."""
    delays = [0.0, *times.transfers, 0.0]
    for way, (one, other) in enumerate(pairwise(order.schedule.placement), start=1):
        if one == other:
            delays[way] = 0.0
    took = times.durations
    there = [0.0] * order.schedule.slot_count
    clocks = [0.0] * len(order.schedule.ranks)
    starts = []
    for rank, duration, takes, makes, way in order.steps:
        start = clocks[rank]
        if there[takes] > start:
            start = there[takes]
        starts.append(start)
        clocks[rank] = end = start + took[duration]
        there[makes] = end + delays[way]
    return starts, max(clocks)


def simulate(schedule: Schedule, times: ActionTimes) -> Timeline:
    """Times every action: each rank does its actions in order, each as soon as its input is there.
    Raises ScheduleError if the schedule stops before its end."""
    order = action_order(schedule)
    starts, _ = action_starts(order, times)
    took = times.durations
    spans = []
    for action, step, start in zip(order.actions, order.steps, starts, strict=True):
        spans.append(Span(step[0], action, start, start + took[step[1]]))
    return Timeline(name=schedule.name, ranks=len(schedule.ranks), spans=tuple(spans))


def measured_times(schedule: Schedule, spans: Sequence[Span]) -> ActionTimes:
    """Takes the median time of each kind of action on each stage, and no time for transfers: the
    measured timeline's difference to the simulated one shows what they took."""
    found: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in spans:
        found[span.action.stage, span.action.kind].append(span.duration_s)
    stages = []
    for stage in range(schedule.stages):
        forward, backward, input_s, weight = (median(found[stage, kind] or [0.0]) for kind in Kind)
        stages.append(
            StageTimes(forward=forward, input=input_s, weight=weight, full_backward=backward)
        )
    return ActionTimes(stages=tuple(stages), transfers=(0.0,) * (schedule.stages - 1))

"""Simulates the timeline of a schedule from the duration of each kind of action, without torch.

Each rank executes its actions in order, each as soon as its input has arrived. The order of all
actions does not depend on durations. `action_order` computes it once, and each simulation is a
single pass over it.
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
    """Durations of one stage for one microbatch, in any common unit.

    `full_backward` is separate because a full backward pass can be cheaper than its two halves.
    None: the sum of the halves.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    full_backward: float | None = None

    @property
    def backward(self) -> float:
        return self.input + self.weight if self.full_backward is None else self.full_backward


EQUAL = StageTimes()  # The papers on schedules assume these times.


@dataclass(frozen=True, kw_only=True)
class ActionTimes:
    """Durations of all actions and transfers.

    `transfers[s]` is the delay between stages s and s + 1 in either direction. It delays the action
    that consumes the message but does not block the sender. It is ignored if both stages are on the
    same rank.
    """

    stages: tuple[StageTimes, ...]
    transfers: tuple[float, ...]

    @cached_property
    def durations(self) -> list[float]:
        """Duration of each kind of action on each stage, at index 4 x stage + kind."""
        found: list[float] = []
        for stage in self.stages:
            found += (stage.forward, stage.backward, stage.input, stage.weight)
        return found

    @classmethod
    def uniform(
        cls, stages: int, times: StageTimes = EQUAL, *, transfer: float = 0.0
    ) -> ActionTimes:
        """Returns the durations of identical stages."""
        return cls(stages=(times,) * stages, transfers=(transfer,) * (stages - 1))


@dataclass(frozen=True)
class ActionOrder:
    """Actions of a schedule in an order that respects their dependencies.

    Each of `steps` holds (rank, index of the duration, input slot, output slot, index of the
    transfer). The index of the duration is 4 x stage + kind. The index of the transfer is the later
    of its two stages. 0 and the number of stages mean no transfer.
    """

    schedule: Schedule
    actions: Sequence[Action]
    steps: Sequence[tuple[int, int, int, int, int]]


def action_order(schedule: Schedule) -> ActionOrder:
    """Returns an order for the simulation. Raises ScheduleError if the schedule deadlocks."""
    actions = []
    steps = []
    for rank, action, takes, makes in schedule.in_order():
        code = _CODES[action.kind]
        way = action.stage + 1 if code == 0 else action.stage
        actions.append(action)
        steps.append((rank, 4 * action.stage + code, takes, makes, way))
    return ActionOrder(schedule, actions, steps)


def action_starts(order: ActionOrder, times: ActionTimes) -> tuple[list[float], float]:
    """Returns the start of each of `order.steps`, and the time when all actions have ended."""
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
    """Computes the start and end of every action. Raises ScheduleError if the schedule
    deadlocks."""
    order = action_order(schedule)
    starts, _ = action_starts(order, times)
    took = times.durations
    spans = []
    for action, step, start in zip(order.actions, order.steps, starts, strict=True):
        spans.append(Span(step[0], action, start, start + took[step[1]]))
    return Timeline(name=schedule.name, ranks=len(schedule.ranks), spans=tuple(spans))


def measured_times(schedule: Schedule, spans: Sequence[Span]) -> ActionTimes:
    """Returns the median duration of each kind of action on each stage, 0 for kinds without spans.

    Transfers are set to 0, so the difference between measured and simulated timelines shows their
    cost.
    """
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

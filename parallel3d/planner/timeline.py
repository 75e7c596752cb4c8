"""The pipeline in time: the real `Schedule` simulated, and closed forms for ranking candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallel3d.config import ScheduleName
from parallel3d.pipeline.schedule import Kind, Schedule
from parallel3d.pipeline.schedules import build_schedule, placement

_WINDOW = 4  # pipelines' depths of microbatches after which a schedule repeats itself
_schedule = lru_cache(maxsize=256)(build_schedule)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one stage for one microbatch. The backward is `input` and `weight`; a schedule may split it."""

    forward: float
    input: float
    weight: float = 0.0

    @property
    def backward(self) -> float:
        return self.input + self.weight


def makespan_s(schedule: Schedule, times: Sequence[StageTimes], send_s: float) -> float:
    """When the last action of a schedule ends. `pipeline.simulate` gives every action's start and end; this gives the
    one number that a search asks for, several times faster (a test compares them)."""
    takes = {}
    for stage, own in enumerate(times):
        takes[stage, Kind.FORWARD], takes[stage, Kind.BACKWARD] = own.forward, own.backward
        takes[stage, Kind.INPUT], takes[stage, Kind.WEIGHT] = own.input, own.weight
    outputs: dict[tuple[int, int], float] = {}  # (stage, microbatch) -> when its forward ended
    gradients: dict[tuple[int, int], float] = {}  # likewise the gradient of its input
    clocks, position = [0.0] * len(schedule.ranks), [0] * len(schedule.ranks)
    holders, last, moving = schedule.placement, schedule.stages - 1, True
    while moving:
        moving = False
        for rank, actions in enumerate(schedule.ranks):
            at, clock = position[rank], clocks[rank]
            while at < len(actions):
                stage, kind, microbatch = actions[at]
                made, giver = (outputs, stage - 1) if kind is Kind.FORWARD else (gradients, stage + 1)
                if kind is not Kind.WEIGHT and 0 <= giver <= last:
                    ready = made.get((giver, microbatch))
                    if ready is None:
                        break
                    clock = max(clock, ready if holders[giver] == rank else ready + send_s)
                clock += takes[stage, kind]
                if kind is not Kind.WEIGHT:
                    made[stage, microbatch] = clock
                at += 1
            if at > position[rank]:
                position[rank], clocks[rank], moving = at, clock, True
    return max(clocks)


def pipeline_s(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int, times: Sequence[StageTimes], send_s: float
) -> float:
    """The makespan of a step's microbatches; a transfer between stages takes `send_s`."""
    if pp == 1:
        return microbatches * sum(t.forward + t.backward for t in times)
    return _of_long(name, pp, microbatches, virtual_stages, lambda schedule: makespan_s(schedule, times, send_s))


def shared_makespan_s(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int, times: Sequence[StageTimes], at_once: float
) -> float:
    """The makespan where only so many ranks' worth of processors are there: those that have work share them evenly.
    Transfers are part of `times`."""
    return _of_long(name, pp, microbatches, virtual_stages, lambda schedule: _shared(schedule, times, at_once))


def _of_long(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int, makespan_of: Callable[[Schedule], float]
) -> float:
    """Beyond a few times the pipeline's depth a schedule repeats itself, so a long one is two short ones and a straight
    line."""

    def makespan(count: int) -> float:
        # Not checked: the tests prove every builder.
        return makespan_of(_schedule(name, pp=pp, microbatches=count, virtual_stages=virtual_stages, check=False))

    window = _WINDOW * pp
    if microbatches <= 3 * window:
        return makespan(microbatches)
    first, second = makespan(window), makespan(2 * window)
    return second + (second - first) / window * (microbatches - 2 * window)


def _shared(schedule: Schedule, times: Sequence[StageTimes], at_once: float) -> float:
    takes = {}
    for stage, own in enumerate(times):
        takes[stage, Kind.FORWARD], takes[stage, Kind.BACKWARD] = own.forward, own.backward
        takes[stage, Kind.INPUT], takes[stage, Kind.WEIGHT] = own.input, own.weight
    made: set[tuple[bool, int, int]] = set()  # (forward, stage, microbatch)
    last = schedule.stages - 1
    position = [0] * len(schedule.ranks)
    left: dict[int, float] = {}  # of the action that a rank works on
    now = 0.0
    while True:
        for rank, actions in enumerate(schedule.ranks):
            if rank in left or position[rank] == len(actions):
                continue
            stage, kind, microbatch = actions[position[rank]]
            giver = stage - 1 if kind is Kind.FORWARD else stage + 1
            waits = kind is not Kind.WEIGHT and 0 <= giver <= last
            if not waits or (kind is Kind.FORWARD, giver, microbatch) in made:
                left[rank] = takes[stage, kind]
        if not left:
            return now
        rate = min(1.0, at_once / len(left))
        shortest = min(left.values())
        now += shortest / rate
        for rank in [rank for rank in left if left[rank] <= shortest * (1 + 1e-12)]:
            del left[rank]
            stage, kind, microbatch = schedule.ranks[rank][position[rank]]
            position[rank] += 1
            if kind is not Kind.WEIGHT:
                made.add((kind is Kind.FORWARD, stage, microbatch))
        for rank in left:
            if left[rank] > 0:
                left[rank] -= shortest


def closed_form_s(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int, times: Sequence[StageTimes], send_s: float
) -> float:
    """The slowest rank's work, and the bubble of an even pipeline: known for the classic schedules (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2), simulated once for the others."""
    per_rank = [0.0] * pp
    for rank, stage in zip(placement(name, pp=pp, virtual_stages=virtual_stages), times, strict=True):
        per_rank[rank] += stage.forward + stage.backward
    slowest = max(per_rank)
    if name in ("1f1b", "gpipe", "interleaved_1f1b"):
        bubble = (sum(per_rank) - slowest) / virtual_stages
    else:
        bubble = _even_bubble(name, pp, min(microbatches, 2 * pp), virtual_stages) * sum(per_rank) / pp
    return microbatches * slowest + bubble + 2 * (pp - 1) * send_s


@lru_cache(maxsize=256)
def _even_bubble(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> float:
    """The bubble of equal stages, in microbatches' work of a rank; forward and both halves of the backward alike."""
    each = 1 / (3 * virtual_stages)
    times = [StageTimes(forward=each, input=each, weight=each)] * (pp * virtual_stages)
    return pipeline_s(name, pp, microbatches, virtual_stages, times, 0.0) - microbatches


def split_backward_s(
    pp: int, microbatches: int, times: Sequence[StageTimes], send_s: float, *, weight_s: float, double: bool
) -> float:
    """Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241, table 2): with the weights' gradients computed apart the
    bubble is (p - 1)(F + B - W) in the memory of 1F1B, and (p - 1)(F + B - 2 W) in twice that, never negative."""
    per_rank = [t.forward + t.backward for t in times]
    mean = sum(per_rank) / pp
    saved = 3.0 if double else 2.0  # `mean` is F + B + W
    bubble = max(0.0, (pp - 1) * (mean - saved * weight_s))
    return microbatches * max(per_rank) + bubble + 2 * (pp - 1) * send_s

"""The pipeline in time: the real `Schedule` simulated, and closed forms for ranking candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from parallel3d.schedules.builders import build_schedule, placement
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Kind, Schedule

_WINDOW = 4  # pipelines' depths of microbatches after which a schedule repeats itself
_NOTHING, _KINDS = -1, (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one stage for one microbatch. The backward is `input` and `weight`; a schedule may split it."""

    forward: float
    input: float
    weight: float = 0.0

    @property
    def backward(self) -> float:
        return self.input + self.weight


class _Step(NamedTuple):
    """An action by numbers: what it takes (an index of `_takes`), the result that it needs and the one that it gives
    (`_NOTHING`: none), and whether the former comes from another rank."""

    takes: int
    needs: int
    gives: int
    is_far: bool


@dataclass(frozen=True)
class _Order:
    """A schedule's actions, rank by rank, and how many results there are."""

    ranks: tuple[tuple[_Step, ...], ...]
    results: int


def makespan_s(schedule: Schedule, times: Sequence[StageTimes], send_s: float) -> float:
    """When the last action of a schedule ends. `pipeline.simulate` gives every action's start and end; this gives the
    one number that a search asks for, many times faster (a test compares them)."""
    return _makespan_s(_by_numbers(schedule), times, send_s)


def pipeline_s(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int, times: Sequence[StageTimes], send_s: float
) -> float:
    """The makespan of a step's microbatches; a transfer between stages takes `send_s`. Beyond a few times the
    pipeline's depth a schedule repeats itself, so a long one is two short ones and a straight line."""
    if pp == 1:
        return microbatches * sum(t.forward + t.backward for t in times)
    return _long(pp, microbatches, lambda count: _makespan_s(_order(name, pp, count, virtual_stages), times, send_s))


def shared_makespan_s(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int, times: Sequence[StageTimes], at_once: float
) -> float:
    """The makespan where only so many ranks' worth of processors are there: those that have work share them evenly.
    Transfers are part of `times`. Long schedules as in `pipeline_s`."""
    return _long(pp, microbatches, lambda count: _shared(_order(name, pp, count, virtual_stages), times, at_once))


def _long(pp: int, microbatches: int, makespan: Callable[[int], float]) -> float:
    window = _WINDOW * pp
    if microbatches <= 3 * window:
        return makespan(microbatches)
    first, second = makespan(window), makespan(2 * window)
    return second + (second - first) / window * (microbatches - 2 * window)


@lru_cache(maxsize=256)
def _order(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> _Order:
    # Not checked: the tests prove every builder.
    return _by_numbers(
        build_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages, check=False)
    )


def _by_numbers(schedule: Schedule) -> _Order:
    """Results: every stage's output of every microbatch, then every stage's gradient of its input."""
    holders, last, count = schedule.placement, schedule.stages - 1, schedule.microbatches
    outputs = schedule.stages * count
    codes = {kind: code for code, kind in enumerate(_KINDS)}
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        steps = []
        for stage, kind, microbatch in actions:
            forward, place = kind is Kind.FORWARD, stage * count + microbatch
            giver = stage - 1 if forward else stage + 1
            waits = kind is not Kind.WEIGHT and 0 <= giver <= last
            needs = (0 if forward else outputs) + giver * count + microbatch if waits else _NOTHING
            gives = _NOTHING if kind is Kind.WEIGHT else place + (0 if forward else outputs)
            steps.append(_Step(4 * stage + codes[kind], needs, gives, waits and holders[giver] != rank))
        ranks.append(tuple(steps))
    return _Order(tuple(ranks), 2 * outputs)


def _takes(times: Sequence[StageTimes]) -> list[float]:
    """Seconds by 4 x stage + kind."""
    return [seconds for own in times for seconds in (own.forward, own.backward, own.input, own.weight)]


def _makespan_s(order: _Order, times: Sequence[StageTimes], send_s: float) -> float:
    seconds, done = _takes(times), [-1.0] * order.results
    clocks, position = [0.0] * len(order.ranks), [0] * len(order.ranks)
    moving = True
    while moving:
        moving = False
        for rank, steps in enumerate(order.ranks):
            start = at = position[rank]
            clock = clocks[rank]
            for takes, needs, gives, is_far in islice(steps, start, None):
                if needs >= 0:
                    ready = done[needs]
                    if ready < 0:
                        break
                    if is_far:
                        ready += send_s
                    if ready > clock:
                        clock = ready
                clock += seconds[takes]
                if gives >= 0:
                    done[gives] = clock
                at += 1
            if at > start:
                position[rank], clocks[rank], moving = at, clock, True
    return max(clocks)


def _shared(order: _Order, times: Sequence[StageTimes], at_once: float) -> float:
    seconds, done = _takes(times), [False] * order.results
    position = [0] * len(order.ranks)
    left: dict[int, float] = {}  # of the action that a rank works on
    now = 0.0
    while True:
        for rank, steps in enumerate(order.ranks):
            if rank in left or position[rank] == len(steps):
                continue
            takes, needs, _, _ = steps[position[rank]]
            if needs == _NOTHING or done[needs]:
                left[rank] = seconds[takes]
        if not left:
            return now
        rate = min(1.0, at_once / len(left))
        shortest = min(left.values())
        now += shortest / rate
        for rank in [rank for rank in left if left[rank] <= shortest * (1 + 1e-12)]:
            del left[rank]
            gives = order.ranks[rank][position[rank]].gives
            position[rank] += 1
            if gives != _NOTHING:
                done[gives] = True
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
    if schedule_traits(name).ramp_bubble:
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
    bubble is (p - 1)(F + B - W) in the memory of 1F1B, and (p - 1)(F + B - 2 W) in twice that, never negative. Where
    microbatches are few, what no schedule goes below is more: the last stage runs every forward and every input's
    gradient before the last of these starts its way back."""
    per_rank = [t.forward + t.backward for t in times]
    mean = sum(per_rank) / pp
    saved = 3.0 if double else 2.0  # `mean` is F + B + W
    bubble = max(0.0, (pp - 1) * (mean - saved * weight_s))
    *others, last = [t.forward + t.input for t in times]
    way = sum(others) + microbatches * last + times[0].weight
    return max(microbatches * max(per_rank) + bubble, way) + 2 * (pp - 1) * send_s

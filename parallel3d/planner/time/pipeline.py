"""The pipeline in a step's time: the schedule simulated, and closed forms for ranking candidates.
No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.timeline.simulate import (
    ActionOrder,
    ActionTimes,
    StageTimes,
    action_order,
    action_starts,
)

_WINDOW = 4  # pipelines' depths of microbatches after which a schedule repeats itself


def pipeline_s(
    name: ScheduleName,
    pp: int,
    microbatches: int,
    times: list[StageTimes],
    send_s: float = 0.0,
    at_once: float = inf,
) -> float:
    """Returns the makespan of a step's microbatches, in seconds; `times` are the stages'. A
    transfer between them takes `send_s`. Ranks that have work divide `at_once` ranks' worth of
    processors evenly; where those are fewer than ranks, transfers are part of `times`. A long
    schedule repeats itself and is extrapolated from two short ones."""
    work = sum(t.forward + t.backward for t in times)
    if pp == 1:
        return microbatches * work / min(1.0, at_once)
    both = ActionTimes(stages=tuple(times), transfers=(send_s,) * (len(times) - 1))

    def makespan(count: int) -> float:
        _, alone = action_starts(_order(name, pp, count, len(times) // pp), both)
        if pp <= at_once:
            return alone
        bubble = alone - count * work / pp
        return max(alone, count * work / at_once + bubble * max(0.0, at_once - 1) / (pp - 1))

    window = _WINDOW * pp
    if microbatches <= 3 * window:
        return makespan(microbatches)
    first = makespan(window)
    second = makespan(2 * window)
    return second + (second - first) / window * (microbatches - 2 * window)


@lru_cache(maxsize=256)
def _order(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> ActionOrder:
    schedule = build_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    return action_order(schedule)


def closed_form_s(
    name: ScheduleName,
    pp: int,
    microbatches: int,
    times: list[StageTimes],
    send_s: float = 0.0,
    at_once: float = inf,
) -> float:
    """Adds the work of the slowest rank (where ranks have several stages, of the slowest in each
    turn) and the bubble of an even pipeline, in seconds; ranks that share processors take no less
    than all their work. The bubble is known for the classic schedules (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2) and simulated once for others."""
    virtual_stages = len(times) // pp
    stages_s = [stage.forward + stage.backward for stage in times]
    work = sum(stages_s)
    if schedule_traits(name).ramp_bubble:  # whose stages go round and round
        slowest = max(sum(stages_s[rank::pp]) for rank in range(pp))
        bubble = (work - slowest) / virtual_stages
    else:
        bubble = _even_bubble(name, pp, min(microbatches, 2 * pp), virtual_stages) * work / pp
    in_turns = sum(max(stages_s[at : at + pp]) for at in range(0, len(times), pp))
    alone = microbatches * in_turns + bubble + 2 * (pp - 1) * send_s
    return max(alone, microbatches * work / at_once)


@lru_cache(maxsize=256)
def _even_bubble(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> float:
    """Simulates the bubble, in a rank's work on one microbatch, where forward and both halves of
    backward are equal."""
    each = 1 / (3 * virtual_stages)
    times = [StageTimes(forward=each, input=each, weight=each)] * (pp * virtual_stages)
    return pipeline_s(name, pp, microbatches, times) - microbatches


def split_backward_s(
    pp: int,
    microbatches: int,
    times: Sequence[StageTimes],
    send_s: float,
    *,
    weight_s: float,
    double: bool,
) -> float:
    """Estimates, in seconds, the published zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241,
    table 2). With the weights' gradients computed apart the bubble is (p - 1)(F + B - W) in the
    memory of 1F1B, and (p - 1)(F + B - 2 W) in twice that (`double`), never negative. With few
    microbatches another bound is higher: the last stage runs every forward and every input's
    gradient before the last of these starts its way back."""
    per_rank = [t.forward + t.backward for t in times]
    mean = sum(per_rank) / pp
    saved = 3.0 if double else 2.0  # `mean` is F + B + W
    bubble = max(0.0, (pp - 1) * (mean - saved * weight_s))
    *others, last = [t.forward + t.input for t in times]
    way = sum(others) + microbatches * last + times[0].weight
    return max(microbatches * max(per_rank) + bubble, way) + 2 * (pp - 1) * send_s

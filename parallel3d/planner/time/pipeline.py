"""Computes the time of a pipeline, by simulating its schedule or by a closed form that ranks
candidates.
"""

from __future__ import annotations

from functools import lru_cache

from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.timeline.simulate import (
    ActionOrder,
    ActionTimes,
    StageTimes,
    action_order,
    action_starts,
)

_WINDOW = 4  # A schedule repeats itself after this many microbatches per pipeline rank.


def pipeline_s(
    name: ScheduleName, pp: int, microbatches: int, times: list[StageTimes], send_s: float = 0.0
) -> float:
    """Simulates a step's microbatches and returns their makespan in seconds.

    Schedules with more than 12 x pp microbatches are extrapolated from two shorter ones.

    Args:
        name: Schedule name.
        pp: Number of pipeline ranks.
        microbatches: Microbatches per step.
        times: Seconds per microbatch of each stage.
        send_s: Seconds of a transfer between stages.
    """
    if pp == 1:
        return microbatches * sum(t.forward + t.backward for t in times)
    both = ActionTimes(stages=tuple(times), transfers=(send_s,) * (len(times) - 1))

    def makespan(count: int) -> float:
        _, seconds = action_starts(_order(name, pp, count, len(times) // pp), both)
        return seconds

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
    name: ScheduleName, pp: int, microbatches: int, times: list[StageTimes], send_s: float = 0.0
) -> float:
    """Estimates `pipeline_s`: work of the slowest rank, bubble of an even pipeline, and transfers.

    With virtual stages, the work is the sum of the slowest of each pp consecutive stages. The
    bubble of classic schedules is a formula (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    That of others is simulated once.
    """
    virtual_stages = len(times) // pp
    stages_s = [stage.forward + stage.backward for stage in times]
    work = sum(stages_s)
    if schedule_traits(name).ramp_bubble:  # These schedules assign stages to ranks round-robin.
        slowest = max(sum(stages_s[rank::pp]) for rank in range(pp))
        bubble = (work - slowest) / virtual_stages
    else:
        bubble = _even_bubble(name, pp, min(microbatches, 2 * pp), virtual_stages) * work / pp
    in_turns = sum(max(stages_s[at : at + pp]) for at in range(0, len(times), pp))
    return microbatches * in_turns + bubble + 2 * (pp - 1) * send_s


@lru_cache(maxsize=256)
def _even_bubble(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> float:
    """Simulates the bubble of equal stages, in units of a rank's work on one microbatch.

    The forward pass and both halves of the backward pass take equal time.
    """
    each = 1 / (3 * virtual_stages)
    times = [StageTimes(forward=each, input=each, weight=each)] * (pp * virtual_stages)
    return pipeline_s(name, pp, microbatches, times) - microbatches

"""Checks that a schedule is complete and free of deadlocks.

Lookups use flat arrays indexed by stage x microbatches + microbatch, so half a million actions take
a few seconds.
"""

from __future__ import annotations

from parallel3d.errors import ScheduleError
from parallel3d.schedules.schedule import Action, Kind, Schedule

_BEGUN = 1
_HALF = 2
_DONE = 3
# For each kind of action: the state of (stage, microbatch) before it, mapped to the state after it.
_STATE_AFTER = {
    Kind.FORWARD: {0: _BEGUN},
    Kind.BACKWARD: {_BEGUN: _DONE},
    Kind.INPUT: {_BEGUN: _HALF},
    Kind.WEIGHT: {_HALF: _DONE},
}
# State -> kind of the next action.
_MISSING = {0: Kind.FORWARD, _BEGUN: Kind.BACKWARD, _HALF: Kind.WEIGHT}


def check_schedule(schedule: Schedule) -> None:
    """Checks that a schedule is complete and cannot deadlock.

    Every forward action and, unless the schedule is forward-only, every backward action (full, or
    its two halves) must occur once, on the rank that holds the stage. The check constructs one
    order of all actions that agrees with the order of every rank. This suffices for a transport
    whose sends do not block and whose messages between two ranks arrive in order.

    Args:
        schedule: Schedule to check.

    Raises:
        ScheduleError: The schedule is wrong. The error names the rank, the first wrong action and
            the reason.

    Example:
        >>> schedule = parallel3d.build_schedule("zb_h1", pp=4, microbatches=8)
        >>> parallel3d.check_schedule(schedule)
    """
    said = f"schedule {schedule.name}: "
    stages = schedule.stages
    microbatches = schedule.microbatches
    placement = schedule.placement
    if len(schedule.ranks) <= max(placement, default=0):
        raise ScheduleError(f"{said}has {len(schedule.ranks)} ranks, but a stage on another")
    states = bytearray(stages * microbatches)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, kind, microbatch = action
            place = stage * microbatches + microbatch
            if not 0 <= stage < stages or placement[stage] != rank:
                fault = "the stage is not on this rank"
            elif not 0 <= microbatch < microbatches:
                fault = "the microbatch does not exist"
            elif (after := _STATE_AFTER[kind].get(states[place])) is None:
                fault = "occurs twice, or before an action of the same stage that it needs"
            elif kind is not Kind.FORWARD and not schedule.trains:
                fault = "is not part of a forward-only schedule"
            else:
                states[place] = after
                continue
            raise ScheduleError(f"{said}rank {rank}, {action}: {fault}")
    last = _DONE if schedule.trains else _BEGUN
    for place, state in enumerate(states):
        if state != last:
            stage, microbatch = divmod(place, microbatches)
            missing = Action(stage, _MISSING[state], microbatch)
            raise ScheduleError(f"{said}rank {placement[stage]}, {missing} is missing")
    for _ in schedule.in_order():
        pass

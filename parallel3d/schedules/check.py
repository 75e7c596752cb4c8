"""The proof that a schedule can be carried out: every action comes once, on its rank, and no rank
waits for ever.

Lookups are in flat arrays by stage x microbatches + microbatch, so that half a million actions take
some seconds.
"""

from __future__ import annotations

from parallel3d.errors import ScheduleError
from parallel3d.schedules.schedule import Action, Kind, Schedule

_BEGUN = 1
_HALF = 2
_DONE = 3
# kind -> the state of its stage's microbatch before it -> after it
_STATE_AFTER = {
    Kind.FORWARD: {0: _BEGUN},
    Kind.BACKWARD: {_BEGUN: _DONE},
    Kind.INPUT: {_BEGUN: _HALF},
    Kind.WEIGHT: {_HALF: _DONE},
}
_MISSING = {0: Kind.FORWARD, _BEGUN: Kind.BACKWARD, _HALF: Kind.WEIGHT}


def check_schedule(schedule: Schedule) -> None:
    """Proves that the schedule does every forward and every backward (full, or its two halves)
    once, on the rank that holds the stage, and runs to its end with no rank waiting for what never
    comes. Raises ScheduleError naming the rank, the first action that is wrong, and why.

    The proof is one order of all actions that agrees with every rank's own. It is enough for a
    transport whose sends do not block and whose messages between two ranks arrive in the order in
    which they were sent.

    Example:
        >>> schedule = parallel3d.build_schedule("zb_h1", pp=4, microbatches=8)
        >>> parallel3d.check_schedule(schedule)
    """
    said = f"schedule {schedule.name}: "
    stages = schedule.stages
    microbatches = schedule.microbatches
    placement = schedule.placement
    if len(schedule.ranks) <= max(placement, default=0):
        raise ScheduleError(f"{said}has {len(schedule.ranks)} ranks, and a stage on another")
    states = bytearray(stages * microbatches)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, kind, microbatch = action
            place = stage * microbatches + microbatch
            if not 0 <= stage < stages or placement[stage] != rank:
                fault = "this rank holds no such stage"
            elif not 0 <= microbatch < microbatches:
                fault = "there is no such microbatch"
            elif (after := _STATE_AFTER[kind].get(states[place])) is None:
                fault = "comes twice, or before what it needs of its own stage"
            elif kind is not Kind.FORWARD and not schedule.trains:
                fault = "is not asked for"
            else:
                states[place] = after
                continue
            raise ScheduleError(f"{said}rank {rank}, {action}: {fault}")
    last = _DONE if schedule.trains else _BEGUN
    for place, state in enumerate(states):
        if state != last:
            stage, microbatch = divmod(place, microbatches)
            missing = Action(stage, _MISSING[state], microbatch)
            raise ScheduleError(f"{said}rank {placement[stage]}, {missing} is never done")
    for _ in schedule.in_order():
        pass

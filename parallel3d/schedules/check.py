"""The proof that a schedule can be carried out: every action comes once, on its rank, and no rank
waits for ever.

Lookups are in flat arrays by stage x microbatches + microbatch, so that half a million actions take
some seconds.
"""

from __future__ import annotations

from parallel3d.errors import ScheduleError
from parallel3d.schedules.schedule import Action, Kind, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
_BIT = {F: 1, B: 2, I: 4, W: 8}


def check_schedule(schedule: Schedule) -> None:
    """Proves that the schedule does every forward and every backward (full, or its two halves)
    once, on the rank that holds the stage, and runs to its end with no rank waiting for what never
    comes. Raises ScheduleError naming the rank, the first action that is wrong, and why.

    The proof is one order of all actions that agrees with every rank's own. It is enough for a
    transport whose sends do not block and whose messages between two ranks arrive in the order in
    which they were sent.
    """
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    if len(schedule.ranks) <= max(placement, default=0):
        raise ScheduleError(
            f"schedule {schedule.name}: has {len(schedule.ranks)} ranks, and a stage on another"
        )
    done = bytearray(stages * microbatches)  # the bits of the kinds of action
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, kind, microbatch = action
            if not 0 <= stage < stages or placement[stage] != rank:
                fault = "this rank holds no such stage"
            elif not 0 <= microbatch < microbatches or (kind is not F and not schedule.trains):
                fault = "is not asked for"
            elif done[stage * microbatches + microbatch] & _BIT[kind]:
                fault = "is done twice"
            else:
                done[stage * microbatches + microbatch] |= _BIT[kind]
                continue
            raise ScheduleError(f"schedule {schedule.name}: rank {rank}, {action}: {fault}")
    allowed = {_BIT[F] | _BIT[B], _BIT[F] | _BIT[I] | _BIT[W]} if schedule.trains else {_BIT[F]}
    if not set(done) <= allowed:
        wrong = [place for place, kinds in enumerate(done) if kinds not in allowed]
        stage, microbatch = divmod(wrong[0], microbatches)
        there = {kind for kind, bit in _BIT.items() if done[wrong[0]] & bit}
        if B in there and there & {I, W}:
            half = Action(stage, min(there & {I, W}), microbatch)
            fault = f"{half}: the full backward {Action(stage, B, microbatch)} is there too"
        else:
            missing = F if F not in there else I if W in there else W if I in there else B
            fault = f"{Action(stage, missing, microbatch)} is never done"
        place = f"schedule {schedule.name}: rank {placement[stage]}"
        raise ScheduleError(f"{place}, {fault} ({len(wrong)} such of {len(done)})")
    for _ in schedule.in_order():
        pass

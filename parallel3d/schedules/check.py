"""The proof that a schedule can be carried out: every action comes once, on its rank, and no rank waits for ever.

All lookups are in flat arrays by stage x microbatches + microbatch, so that half a million actions are proved in some
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.errors import ScheduleError
from parallel3d.schedules.schedule import Action, Kind, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
_BIT = {F: 1, B: 2, I: 4, W: 8}
_FULL, _SPLIT, _FORWARD_ALONE = _BIT[F] | _BIT[B], _BIT[F] | _BIT[I] | _BIT[W], _BIT[F]


def check_schedule(schedule: Schedule) -> None:
    """Proves that the schedule does every forward and every backward (full, or its two halves) once, on the rank that
    holds the stage, and runs to its end with no rank waiting for what never comes. Raises ScheduleError naming the
    rank, the first action that is wrong, and why.

    The proof is one order of all actions that agrees with every rank's own. It is enough for a transport whose sends
    do not block and whose messages between two ranks arrive in the order in which they were sent.
    """
    _check_complete(schedule)
    for _ in in_order(schedule):
        pass


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yields (rank, action) for all actions of a complete schedule, each after the actions that it needs. Raises
    ScheduleError where no such order exists, naming where each rank stands and what it waits for."""
    microbatches, last = schedule.microbatches, schedule.stages - 1
    forward_done, gradient_done = bytearray(schedule.stages * microbatches), bytearray(schedule.stages * microbatches)
    position = [0] * len(schedule.ranks)
    waiting: dict[tuple[bool, int], int] = {}  # (is a forward, its place) -> the rank that waits for it
    ready = list(reversed(range(len(schedule.ranks))))
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        for at in range(position[rank], len(actions)):
            action = actions[at]
            stage, kind, microbatch = action
            place = stage * microbatches + microbatch
            if kind is F:
                if stage > 0 and not forward_done[place - microbatches]:
                    waiting[True, place - microbatches] = rank
                    break
            elif kind is W:
                if not gradient_done[place]:
                    break
            elif not forward_done[place]:
                break
            elif stage < last and not gradient_done[place + microbatches]:
                waiting[False, place + microbatches] = rank
                break
            yield rank, action
            position[rank] = at + 1
            if kind is not W:
                (forward_done if kind is F else gradient_done)[place] = 1
                waiter = waiting.pop((kind is F, place), None)
                if waiter is not None:
                    ready.append(waiter)
    _refuse_stuck(schedule, position)


def _check_complete(schedule: Schedule) -> None:
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    if len(schedule.ranks) <= max(placement, default=0):
        raise ScheduleError(f"schedule {schedule.name}: has {len(schedule.ranks)} ranks, and a stage on another")
    done = bytearray(stages * microbatches)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, kind, microbatch = action
            if not 0 <= stage < stages or placement[stage] != rank:
                raise ScheduleError(_refusal(schedule, action, rank, "this rank holds no such stage"))
            if not 0 <= microbatch < microbatches or (kind is not F and not schedule.trains):
                raise ScheduleError(_refusal(schedule, action, rank, "is not asked for"))
            place = stage * microbatches + microbatch
            if done[place] & _BIT[kind]:
                raise ScheduleError(_refusal(schedule, action, rank, "is done twice"))
            done[place] |= _BIT[kind]
    allowed = (_FULL, _SPLIT) if schedule.trains else (_FORWARD_ALONE,)
    if set(done) <= set(allowed):
        return
    place = next(place for place, each in enumerate(done) if each not in allowed)
    stage, microbatch = divmod(place, microbatches)
    raise ScheduleError(
        f"schedule {schedule.name}: rank {placement[stage]}, {_lacking(stage, microbatch, done[place])}"
        f" ({sum(each not in allowed for each in done)} such of {len(done)})"
    )


def _lacking(stage: int, microbatch: int, done: int) -> str:
    """What is wrong with the actions of a stage on a microbatch, from `done`, the bits of their kinds."""
    has = {kind for kind, bit in _BIT.items() if done & bit}
    if B in has and has & {I, W}:
        half = Action(stage, next(iter(has & {I, W})), microbatch)
        return f"{half}: the full backward {Action(stage, B, microbatch)} is there too"
    if F not in has:
        return f"{Action(stage, F, microbatch)} is never done"
    missing = I if W in has else W if I in has else B
    return f"{Action(stage, missing, microbatch)} is never done"


def _refusal(schedule: Schedule, action: Action, rank: int, reason: str) -> str:
    return f"schedule {schedule.name}: rank {rank}, {action}: {reason}"


def _refuse_stuck(schedule: Schedule, position: list[int]) -> None:
    """Raises ScheduleError unless every rank came to its end."""
    if all(at == len(actions) for actions, at in zip(schedule.ranks, position, strict=True)):
        return
    done = {action for actions, at in zip(schedule.ranks, position, strict=True) for action in actions[:at]}
    stuck = []
    for rank, (actions, at) in enumerate(zip(schedule.ranks, position, strict=True)):
        if at < len(actions):
            missing = next(need for need in schedule.needs(actions[at]) if need not in done)
            stuck.append(f"rank {rank} at {actions[at]} waits for {missing}")
    raise ScheduleError(f"schedule {schedule.name} stops before its end: {'; '.join(stuck)}")

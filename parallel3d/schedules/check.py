"""The proof that a schedule can be carried out: every action once, on its rank, and no rank waits for ever.

Everything is looked up in flat arrays by stage x microbatches + microbatch, so that half a million actions are proved
in about a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from parallel3d.errors import ScheduleError
from parallel3d.schedules.schedule import Action, Kind, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
_BIT = {F: 1, B: 2, I: 4, W: 8}
_FULL, _SPLIT, _FORWARD_ALONE = _BIT[F] | _BIT[B], _BIT[F] | _BIT[I] | _BIT[W], _BIT[F]


def check_schedule(schedule: Schedule) -> None:
    """Proves that the schedule does every forward and every backward (full, or its two halves) once, on the rank that
    holds the stage, and runs to its end with no rank waiting for what never comes. Raises ScheduleError naming the
    rank, the first action that is wrong, and why.

    That the ranks' orders admit one order of all actions is enough where sends do not block, and between two ranks
    things arrive in the order in which they were sent. For sends that block, see `blocks`.
    """
    _check_complete(schedule)
    for _ in in_order(schedule):
        pass


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(rank, action) for all actions, each after what it needs. Raises ScheduleError where the ranks' orders admit no
    such order, naming where each rank stands and what it waits for. The schedule is complete (see `check_schedule`).
    """
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


def blocks(schedule: Schedule, *, slots: int = 0) -> str | None:
    """Where the schedule stops if a send blocks, or None where it runs to its end even so.

    A send waits until its receiver has come to want what was sent `slots` before it on the same way. With none the two
    must meet, as in MPI's synchronous send; a transport that posts n receives ahead of the one it waits for, and leaves
    k sends behind, has n + k. A rank receives in its sender's order and keeps what comes before its turn.
    """
    ranks = _messages(schedule)
    position = [0] * len(ranks)
    sent: defaultdict[tuple[int, int], int] = defaultdict(int)  # (source, target) -> how many the source came to send
    wanted: defaultdict[tuple[int, int], int] = defaultdict(int)  # ... and how many the target came to want
    moving = True
    while moving:
        moving = False
        for rank, messages in enumerate(ranks):
            while position[rank] < len(messages):
                message = messages[position[rank]]
                way, number = message.way, message.number
                if message.is_send:
                    moving, sent[way] = moving or sent[way] <= number, max(sent[way], number + 1)
                    is_done = wanted[way] + slots > number
                else:
                    want = min(sent[way], number) + 1
                    moving, wanted[way] = moving or want > wanted[way], max(wanted[way], want)
                    is_done = sent[way] > number
                if not is_done:
                    break
                position[rank] += 1
                moving = True
    ends = enumerate(zip(ranks, position, strict=True))
    stuck = [f"rank {rank} {messages[at]}" for rank, (messages, at) in ends if at < len(messages)]
    return "; ".join(stuck) or None


def slots_needed(schedule: Schedule) -> int:
    """The fewest slots with which blocking sends do not stop the schedule (see `blocks`): what a transport must let
    wait between two ranks. 0 for GPipe, 1 for 1F1B, m // p for breadth-first over several stages a rank."""
    low, high = 0, max((len(takers) for takers in schedule.transfers.values()), default=0)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if blocks(schedule, slots=middle) is None else (middle + 1, high)
    return low


class _Message(NamedTuple):
    """One end of a transfer, in the order in which a rank comes to it."""

    way: tuple[int, int]  # source rank, target rank
    number: int  # of those on this way
    is_send: bool
    action: Action  # that makes it, or that takes it

    def __str__(self) -> str:
        source, target = self.way
        if self.is_send:
            return f"sends what {self.action} made to rank {target}"
        return f"at {self.action} waits for rank {source}"


def _messages(schedule: Schedule) -> list[list[_Message]]:
    ways = {taker: (way, at) for way, takers in schedule.transfers.items() for at, taker in enumerate(takers)}
    ranks: list[list[_Message]] = []
    for rank, actions in enumerate(schedule.ranks):
        messages = []
        for action in actions:
            if action in ways:
                messages.append(_Message(*ways[action], False, action))
            taker = schedule.feeds(action)
            if taker is not None and schedule.placement[taker.stage] != rank:
                messages.append(_Message(*ways[taker], True, action))
        ranks.append(messages)
    return ranks


def _check_complete(schedule: Schedule) -> None:
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    if len(schedule.ranks) <= max(placement, default=0):
        raise ScheduleError(f"schedule {schedule.name}: has {len(schedule.ranks)} ranks, and a stage on another")
    done = bytearray(stages * microbatches)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, kind, microbatch = action
            if not 0 <= stage < stages or placement[stage] != rank:
                raise ScheduleError(_told(schedule, action, rank, "this rank holds no such stage"))
            if not 0 <= microbatch < microbatches or (kind is not F and not schedule.trains):
                raise ScheduleError(_told(schedule, action, rank, "is not asked for"))
            place = stage * microbatches + microbatch
            if done[place] & _BIT[kind]:
                raise ScheduleError(_told(schedule, action, rank, "is done twice"))
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
    """What is wrong with what is done of a stage's microbatch."""
    has = {kind for kind, bit in _BIT.items() if done & bit}
    if B in has and has & {I, W}:
        half = Action(stage, next(iter(has & {I, W})), microbatch)
        return f"{half}: the full backward {Action(stage, B, microbatch)} is there too"
    if F not in has:
        return f"{Action(stage, F, microbatch)} is never done"
    missing = I if W in has else W if I in has else B
    return f"{Action(stage, missing, microbatch)} is never done"


def _told(schedule: Schedule, action: Action, rank: int, reason: str) -> str:
    return f"schedule {schedule.name}: rank {rank}, {action}: {reason}"


def _refuse_stuck(schedule: Schedule, position: list[int]) -> None:
    """Raises where some rank did not come to its end."""
    if all(at == len(actions) for actions, at in zip(schedule.ranks, position, strict=True)):
        return
    done = {action for actions, at in zip(schedule.ranks, position, strict=True) for action in actions[:at]}
    stuck = []
    for rank, (actions, at) in enumerate(zip(schedule.ranks, position, strict=True)):
        if at < len(actions):
            missing = next(need for need in schedule.needs(actions[at]) if need not in done)
            stuck.append(f"rank {rank} at {actions[at]} waits for {missing}")
    raise ScheduleError(f"schedule {schedule.name} stops before its end: {'; '.join(stuck)}")

"""A pipeline schedule as plain data: for each pipeline rank, the forwards and backwards it does, in order.

The runtime executes it, and nothing else in the package knows one schedule from another. Sends and receives are not
part of it: they follow from which rank holds which stage. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from parallel3d.errors import ScheduleError


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward or backward of one microbatch; written `2F0`: stage 2, forward, microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each pipeline rank does, in order. `placement[stage]` is the rank that holds it; stages count from 0."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    trains: bool = True  # False: forwards alone

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """The stages on a rank, in the order of the model."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def feeds(self, action: Action) -> Action | None:
        """The action, on whatever rank, that takes what `action` makes: the next stage's forward, or the backward of
        the stage before. None at the ends of the pipeline."""
        stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        return Action(stage, action.kind, action.microbatch) if 0 <= stage < self.stages else None

    @cached_property
    def transfers(self) -> dict[tuple[int, int], tuple[Action, ...]]:
        """(source rank, target rank) -> what is sent, in the source's order, each named by the action that takes it."""
        transfers: dict[tuple[int, int], list[Action]] = {}
        for source, actions in enumerate(self.ranks):
            for taker in filter(None, map(self.feeds, actions)):
                if self.placement[taker.stage] != source:
                    transfers.setdefault((source, self.placement[taker.stage]), []).append(taker)
        return {ranks: tuple(takers) for ranks, takers in transfers.items()}

    @cached_property
    def last_backwards(self) -> frozenset[Action]:
        """Each stage's last backward: after it the stage's gradients are complete."""
        last = {a.stage: a for actions in self.ranks for a in actions if a.kind is Kind.BACKWARD}
        return frozenset(last.values())

    @cached_property
    def peak_live_microbatches(self) -> tuple[int, ...]:
        """For each rank, the most forwards at once whose activations wait for their backward."""
        return tuple(max(_live(actions), default=0) for actions in self.ranks)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(action) for action in actions) for actions in self.ranks)


def check_schedule(schedule: Schedule) -> None:
    """Proves that the schedule does every forward and every backward once, on the rank that holds the stage, and runs
    to its end with no rank waiting for what never comes. Raises ScheduleError naming the first action that is wrong.

    That the ranks' orders admit one order of all actions is enough: the runtime's sends do not block, and between two
    ranks things arrive in the order in which they were sent.
    """
    _check_complete(schedule)
    _check_order(schedule)


def _check_complete(schedule: Schedule) -> None:
    kinds = (Kind.FORWARD, Kind.BACKWARD) if schedule.trains else (Kind.FORWARD,)
    missing = {
        Action(stage, kind, microbatch)
        for stage in range(schedule.stages)
        for kind in kinds
        for microbatch in range(schedule.microbatches)
    }
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if not 0 <= action.stage < schedule.stages or schedule.placement[action.stage] != rank:
                raise ScheduleError(
                    f"schedule {schedule.name}: {action} stands on rank {rank}, which has no such stage"
                )
            if action not in missing:
                raise ScheduleError(
                    f"schedule {schedule.name}: {action} on rank {rank} is done twice, or not asked for"
                )
            missing.remove(action)
    if missing:
        first = min(missing, key=lambda a: (a.stage, a.kind, a.microbatch))
        raise ScheduleError(f"schedule {schedule.name}: {first} is never done (of {len(missing)} that are missing)")


def _check_order(schedule: Schedule) -> None:
    done: set[Action] = set()
    position = [0] * len(schedule.ranks)
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions) and all(
                need in done for need in _needs(schedule, actions[position[rank]])
            ):
                done.add(actions[position[rank]])
                position[rank] += 1
                moving = True
    stuck = [
        f"rank {rank} at {actions[at]} waits for {_first_missing(schedule, actions[at], done)}"
        for rank, (actions, at) in enumerate(zip(schedule.ranks, position, strict=True))
        if at < len(actions)
    ]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name} stops before its end: {'; '.join(stuck)}")


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """What must be done before `action`."""
    if action.kind is Kind.FORWARD:
        if action.stage > 0:
            yield Action(action.stage - 1, Kind.FORWARD, action.microbatch)
        return
    yield Action(action.stage, Kind.FORWARD, action.microbatch)
    if action.stage < schedule.stages - 1:
        yield Action(action.stage + 1, Kind.BACKWARD, action.microbatch)


def _first_missing(schedule: Schedule, action: Action, done: set[Action]) -> Action:
    return next(need for need in _needs(schedule, action) if need not in done)


def _live(actions: Sequence[Action]) -> Iterator[int]:
    live = 0
    for action in actions:
        live += 1 if action.kind is Kind.FORWARD else -1
        yield live

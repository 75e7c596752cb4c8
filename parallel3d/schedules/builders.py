"""A schedule made from its name and its numbers, and schedules of forwards alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.errors import ScheduleError
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.classic import Actions, groups
from parallel3d.schedules.registry import Builder, ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Action, Kind, Schedule


def build_schedule(
    name: ScheduleName, *, pp: int, microbatches: int, virtual_stages: int = 1, check: bool = True
) -> Schedule:
    """Builds the schedule of this name. Raises ScheduleError where the numbers do not suit it. Without `check` it is
    not proved again, which for a builder of this package the tests have done."""
    builder = _builder(name, pp, microbatches, virtual_stages)
    schedule = Schedule(
        name=name,
        placement=placement(name, pp=pp, virtual_stages=virtual_stages),
        microbatches=microbatches,
        ranks=tuple(tuple(builder(pp, rank, microbatches, virtual_stages)) for rank in range(pp)),
    )
    if check:
        check_schedule(schedule)
    return schedule


def rank_actions(
    name: ScheduleName, *, pp: int, rank: int, microbatches: int, virtual_stages: int = 1
) -> tuple[Action, ...]:
    """`build_schedule(...).ranks[rank]`, without the other ranks' actions."""
    return tuple(_builder(name, pp, microbatches, virtual_stages)(pp, rank, microbatches, virtual_stages))


def _builder(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> Builder:
    """The schedule's builder. Raises ScheduleError where it does not take these numbers."""
    traits = schedule_traits(name)
    if pp < 1 or microbatches < 1:
        raise ScheduleError(f"schedule {name}: pp = {pp} and {microbatches} microbatches: each must be at least 1")
    if not traits.allows(virtual_stages):
        least = "at least " if traits.most_stages is None else ""
        raise ScheduleError(
            f"schedule {name}: {virtual_stages} stages on each rank; it has {least}{traits.least_stages}"
        )
    return traits.builder


def placement(name: ScheduleName, *, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage: round and round, or down and up again."""
    return _down_and_up(pp) if schedule_traits(name).v_shaped else _round_and_round(pp, virtual_stages)


def forward_only(
    *, pp: int, microbatches: int, virtual_stages: int = 1, placement: tuple[int, ...] | None = None
) -> Schedule:
    """Forwards alone: evaluation and generation. `placement` is that of the training schedule where the stages do not
    go round and round. For at least pp microbatches it takes as few steps as there can be: v m + p - 1, and on a V,
    where the last one has to come up again, 2 (m + p - 1).
    """
    placement = _round_and_round(pp, virtual_stages) if placement is None else placement
    ranks: list[Actions] = [[] for _ in range(pp)]
    for _, stage, m in sorted(_arrivals(placement, pp, microbatches)):
        ranks[placement[stage]].append(Action(stage, Kind.FORWARD, m))
    schedule = Schedule(
        name="forward_only",
        placement=placement,
        microbatches=microbatches,
        ranks=tuple(map(tuple, ranks)),
        trains=False,
    )
    check_schedule(schedule)
    return schedule


def _round_and_round(pp: int, virtual_stages: int) -> tuple[int, ...]:
    return tuple(stage % pp for stage in range(pp * virtual_stages))


def _down_and_up(pp: int) -> tuple[int, ...]:
    return (*range(pp), *reversed(range(pp)))


def _arrivals(placement: tuple[int, ...], pp: int, microbatches: int) -> Iterator[tuple[int, int, int]]:
    """(step, stage, microbatch) for all, so that no two meet on a rank where the placement is a known one."""
    virtual_stages = len(placement) // pp
    if placement != _round_and_round(pp, virtual_stages):
        # On a V a rank's two stages are an odd number of steps apart, so every second step is free for the other.
        pace = 2 if placement == _down_and_up(pp) else 1
        yield from ((pace * m + stage, stage, m) for m in range(microbatches) for stage in range(len(placement)))
        return
    first = 0
    for size in groups(pp, microbatches):
        for stage in range(len(placement)):
            turn, rank = divmod(stage, pp)
            start = first * virtual_stages + turn * size + rank
            yield from ((start + place, stage, first + place) for place in range(size))
        first += size

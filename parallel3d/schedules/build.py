"""A schedule made from its name and its numbers, and schedules of forwards alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.errors import ScheduleError
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.classic import Actions, groups
from parallel3d.schedules.registry import ScheduleName, ScheduleTraits, schedule_traits
from parallel3d.schedules.schedule import Action, Kind, Schedule


def build_schedule(
    name: ScheduleName, *, pp: int, microbatches: int, virtual_stages: int = 1, check: bool = True
) -> Schedule:
    """Builds the schedule of this name. Raises ScheduleError where the numbers do not suit it. Without `check` it is
    not proved again, which for a builder of this package the tests have done."""
    traits = _traits_for(name, pp, microbatches, virtual_stages)
    schedule = Schedule(
        name=name,
        placement=placement(name, pp=pp, virtual_stages=virtual_stages),
        microbatches=microbatches,
        ranks=tuple(tuple(traits.builder(pp, rank, microbatches, virtual_stages)) for rank in range(pp)),
    )
    if check:
        check_schedule(schedule)
    return schedule


def rank_actions(
    name: ScheduleName, *, pp: int, rank: int, microbatches: int, virtual_stages: int = 1
) -> tuple[Action, ...]:
    """Returns `build_schedule(...).ranks[rank]` without building the other ranks' actions."""
    return tuple(_traits_for(name, pp, microbatches, virtual_stages).builder(pp, rank, microbatches, virtual_stages))


def _traits_for(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> ScheduleTraits:
    """Returns the schedule's traits. Raises ScheduleError where its builder does not take these numbers."""
    traits = schedule_traits(name)
    if pp < 1 or microbatches < 1:
        raise ScheduleError(f"schedule {name}: pp = {pp} and {microbatches} microbatches: each must be at least 1")
    if not traits.stages.allow(virtual_stages):
        least = "at least " if traits.stages.most is None else ""
        raise ScheduleError(
            f"schedule {name}: {virtual_stages} stages on each rank; it has {least}{traits.stages.least}"
        )
    return traits


def placement(name: ScheduleName, *, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the rank of each stage: round and round, or down and up again."""
    return _down_and_up(pp) if schedule_traits(name).stages.v_shaped else _round_and_round(pp, virtual_stages)


def forward_only(
    *, pp: int, microbatches: int, virtual_stages: int = 1, placement: tuple[int, ...] | None = None
) -> Schedule:
    """Builds a schedule of forwards alone, for evaluation and generation. `placement` is the training schedule's where
    its stages do not go round and round. For at least pp microbatches no schedule takes fewer steps: v m + p - 1, and
    2 (m + p - 1) on a V, where the last microbatch has to come up again.
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
    """Yields (step, stage, microbatch) for all forwards. No two meet on a rank where the placement is a known one."""
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

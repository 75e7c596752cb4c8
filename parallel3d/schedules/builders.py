"""The schedules by name. Their builders are pure functions, in the files beside this one; a new one is a new entry.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel3d.errors import ScheduleError
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.classic import (
    Actions,
    gpipe,
    groups,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
)
from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.schedules.v_shaped import dualpipe_v, zb_v
from parallel3d.schedules.zero_bubble import interleaved_zb, zb_h1

if TYPE_CHECKING:
    from parallel3d.config.recipe import ScheduleName

BUILDERS: dict[ScheduleName, Callable[[int, int, int, int], Actions]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "naive": naive,
}


@dataclass(frozen=True, kw_only=True)
class StagesPerRank:
    """How many stages a rank may hold in a schedule, and where they stand."""

    least: int = 1
    most: int | None = 1  # None: any number
    usual: int = 1
    v_shaped: bool = False  # the second half of the stages goes back up the ranks

    def allow(self, virtual_stages: int) -> bool:
        return self.least <= virtual_stages and (self.most is None or virtual_stages <= self.most)


_LOOPED = StagesPerRank(most=None, usual=2)
_V = StagesPerRank(least=2, most=2, usual=2, v_shaped=True)

STAGES_PER_RANK: dict[ScheduleName, StagesPerRank] = {
    "gpipe": StagesPerRank(),
    "1f1b": StagesPerRank(),
    "interleaved_1f1b": _LOOPED,
    "looped_bfs": _LOOPED,
    "zb_h1": StagesPerRank(),
    "interleaved_zb": _LOOPED,
    "zb_v": _V,
    "dualpipe_v": _V,
    "naive": StagesPerRank(most=None),
}

# Whose backwards are done in two halves, and what does as well where they cannot be.
WHOLE_INSTEAD: dict[ScheduleName, ScheduleName] = {
    "zb_h1": "1f1b",
    "interleaved_zb": "interleaved_1f1b",
    "zb_v": "interleaved_1f1b",
    "dualpipe_v": "interleaved_1f1b",
}


def build_schedule(
    name: ScheduleName, *, pp: int, microbatches: int, virtual_stages: int = 1, check: bool = True
) -> Schedule:
    """The schedule of this name. Raises ScheduleError where the numbers do not suit it. Without `check` it is not
    proved again, which for a builder of this package the tests have done."""
    _check_numbers(name, pp, microbatches, virtual_stages)
    schedule = Schedule(
        name=name,
        placement=placement(name, pp=pp, virtual_stages=virtual_stages),
        microbatches=microbatches,
        ranks=tuple(tuple(BUILDERS[name](pp, rank, microbatches, virtual_stages)) for rank in range(pp)),
    )
    if check:
        check_schedule(schedule)
    return schedule


def rank_actions(
    name: ScheduleName, *, pp: int, rank: int, microbatches: int, virtual_stages: int = 1
) -> tuple[Action, ...]:
    """`build_schedule(...).ranks[rank]`, without the other ranks'."""
    _check_numbers(name, pp, microbatches, virtual_stages)
    return tuple(BUILDERS[name](pp, rank, microbatches, virtual_stages))


def placement(name: ScheduleName, *, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage: round and round, or down and up again."""
    return _down_and_up(pp) if STAGES_PER_RANK[name].v_shaped else _round_and_round(pp, virtual_stages)


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


def _check_numbers(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> None:
    if name not in BUILDERS:
        raise ScheduleError(f"schedule {name}: unknown; known are {', '.join(BUILDERS)}")
    if pp < 1 or microbatches < 1:
        raise ScheduleError(f"schedule {name}: pp = {pp} and {microbatches} microbatches: each must be at least 1")
    stages = STAGES_PER_RANK[name]
    if not stages.allow(virtual_stages):
        least = "at least " if stages.most is None else ""
        raise ScheduleError(f"schedule {name}: {virtual_stages} stages on each rank; it has {least}{stages.least}")

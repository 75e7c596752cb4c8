"""The builders of schedules: pure functions of (pipeline ranks, microbatches, stages per rank). No torch here.

Stage s stands on rank s mod pp, so that with v virtual stages a microbatch goes round the ranks v times.
"""

from __future__ import annotations

from collections.abc import Callable

from parallel3d.config import ScheduleName
from parallel3d.errors import ScheduleError
from parallel3d.pipeline.schedule import Action, Kind, Schedule, check_schedule

F, B = Kind.FORWARD, Kind.BACKWARD

Ranks = list[list[Action]]


def build_schedule(name: ScheduleName, *, pp: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The checked schedule of this name. Raises ScheduleError where the numbers do not suit it."""
    ranks = BUILDERS[name](pp, microbatches, virtual_stages)
    return _checked(name, pp, microbatches, virtual_stages, ranks, trains=True)


def forward_only(*, pp: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Forwards alone, each as soon as it can be: evaluation and generation."""
    ranks = [
        [Action(stage, F, m) for m in range(microbatches) for stage in range(rank, pp * virtual_stages, pp)]
        for rank in range(pp)
    ]
    return _checked("forward_only", pp, microbatches, virtual_stages, ranks, trains=False)


def gpipe(pp: int, microbatches: int, virtual_stages: int) -> Ranks:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    _one_stage_each("gpipe", virtual_stages)
    forwards = [[Action(rank, F, m) for m in range(microbatches)] for rank in range(pp)]
    return [done + [Action(a.stage, B, a.microbatch) for a in done] for done in forwards]


def one_f_one_b(pp: int, microbatches: int, virtual_stages: int) -> Ranks:
    """One forward, one backward in turn, once the pipeline is full: no more than pp microbatches alive
    (Narayanan et al. 2021, arXiv 2006.09503). With one rank it is gradient accumulation."""
    _one_stage_each("1f1b", virtual_stages)
    ranks = []
    for rank in range(pp):
        forwards = [Action(rank, F, m) for m in range(microbatches)]
        backwards = [Action(rank, B, m) for m in range(microbatches)]
        ranks.append(_in_turn(forwards, backwards, warm_up=pp - rank - 1))
    return ranks


def interleaved_1f1b(pp: int, microbatches: int, virtual_stages: int) -> Ranks:
    """1F1B over virtual stages: a bubble virtual_stages times smaller for as many times the transfers
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Microbatches go in groups of pp."""
    if microbatches % pp:
        raise ScheduleError(f"interleaved_1f1b: {microbatches} microbatches are no multiple of pp = {pp}")
    ranks = []
    for rank in range(pp):
        forwards, backwards = [], []
        for k in range(microbatches * virtual_stages):
            group, within = divmod(k, pp * virtual_stages)
            turn, place = divmod(within, pp)
            microbatch = group * pp + place
            forwards.append(Action(turn * pp + rank, F, microbatch))
            backwards.append(Action((virtual_stages - 1 - turn) * pp + rank, B, microbatch))
        ranks.append(_in_turn(forwards, backwards, warm_up=2 * (pp - rank - 1) + (virtual_stages - 1) * pp))
    return ranks


BUILDERS: dict[ScheduleName, Callable[[int, int, int], Ranks]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
}


def _in_turn(forwards: list[Action], backwards: list[Action], *, warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]


def _one_stage_each(name: str, virtual_stages: int) -> None:
    if virtual_stages != 1:
        raise ScheduleError(f"{name} has one stage on each rank, not {virtual_stages}; use interleaved_1f1b")


def _checked(name: str, pp: int, microbatches: int, virtual_stages: int, ranks: Ranks, *, trains: bool) -> Schedule:
    schedule = Schedule(
        name=name,
        placement=tuple(stage % pp for stage in range(pp * virtual_stages)),
        microbatches=microbatches,
        ranks=tuple(tuple(actions) for actions in ranks),
        trains=trains,
    )
    check_schedule(schedule)
    return schedule

"""Registry of schedules and the traits that config, planner and trainer need, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from parallel3d.errors import ScheduleError
from parallel3d.schedules.classic import (
    Actions,
    WarmUp,
    gpipe,
    in_turn,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
)
from parallel3d.schedules.v_shaped import dualpipe_v, zb_v

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "interleaved_zb",
    "zb_v",
    "dualpipe_v",
    "naive",
]


@dataclass(frozen=True, kw_only=True)
class StagesPerRank:
    """Number of stages that a rank can hold in a schedule, and their placement."""

    least: int = 1
    most: int | None = 1  # None: unlimited
    usual: int = 1  # Number to use by default.
    # True if the second half of the stages is placed on the ranks in reverse order.
    v_shaped: bool = False

    def allow(self, virtual_stages: int) -> bool:
        """Returns True if a rank can hold this number of stages."""
        return self.least <= virtual_stages and (self.most is None or virtual_stages <= self.most)


_ZB_H1 = partial(in_turn, warm_up=zb_h1, splits=True)
_LOOPED = StagesPerRank(most=None, usual=2)
_ON_A_V = StagesPerRank(least=2, most=2, usual=2, v_shaped=True)


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a schedule that do not depend on its size."""

    name: ScheduleName
    # Takes (pp, rank, microbatches, stages per rank). Returns the actions of the rank.
    builder: Callable[[int, int, int, int], Actions]
    stages: StagesPerRank = StagesPerRank()
    # Returns the number of forward actions before forward and backward actions alternate. None:
    # they do not alternate, or backward passes are split.
    warm_up: WarmUp | None = None
    # True if the idle time is (p - 1) / v of a rank's work on one microbatch (arXiv 2104.04473,
    # section 2.2).
    ramp_bubble: bool = False
    holds_whole_batch: bool = False  # All forward actions precede the first backward action.
    splits_backward: bool = False  # Some backward passes run in two halves.


SCHEDULES: dict[ScheduleName, ScheduleTraits] = {
    traits.name: traits
    for traits in (
        ScheduleTraits("gpipe", gpipe, ramp_bubble=True, holds_whole_batch=True),
        ScheduleTraits(
            "1f1b",
            partial(in_turn, warm_up=one_f_one_b),
            warm_up=one_f_one_b,
            ramp_bubble=True,
        ),
        ScheduleTraits(
            "interleaved_1f1b",
            partial(in_turn, warm_up=interleaved_1f1b),
            _LOOPED,
            interleaved_1f1b,
            ramp_bubble=True,
        ),
        ScheduleTraits("looped_bfs", looped_bfs, _LOOPED, holds_whole_batch=True),
        ScheduleTraits("zb_h1", _ZB_H1, splits_backward=True),
        ScheduleTraits("interleaved_zb", _ZB_H1, _LOOPED, splits_backward=True),
        ScheduleTraits("zb_v", zb_v, _ON_A_V, splits_backward=True),
        ScheduleTraits("dualpipe_v", dualpipe_v, _ON_A_V, splits_backward=True),
        ScheduleTraits("naive", naive, StagesPerRank(most=None)),
    )
}


def schedule_traits(name: str) -> ScheduleTraits:
    """Returns the traits of a schedule. Raises ScheduleError if the name is unknown."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name}: unknown; known are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]

"""The schedules by name, with what config, planner and trainer ask about each. A new schedule is one more entry here.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from parallel3d.errors import ScheduleError
from parallel3d.schedules.classic import (
    Actions,
    gpipe,
    interleaved_1f1b,
    interleaved_warm_up,
    looped_bfs,
    naive,
    one_f_one_b,
    one_f_one_b_warm_up,
)
from parallel3d.schedules.v_shaped import dualpipe_v, zb_v
from parallel3d.schedules.zero_bubble import interleaved_zb, zb_h1

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v", "naive"
]

Builder = Callable[[int, int, int, int], Actions]  # (pp, rank, microbatches, stages per rank) -> the rank's actions


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """What is true of a schedule at any size."""

    name: ScheduleName
    builder: Builder
    least_stages: int = 1  # stages that a rank holds at least
    most_stages: int | None = 1  # and at most; None: any number
    usual_stages: int = 1  # stages per rank where nobody says how many
    v_shaped: bool = False  # the second half of the stages goes back up the ranks
    single_stage: ScheduleName = "1f1b"  # the schedule that stands in where a rank has one stage
    whole_backward: ScheduleName | None = None  # the schedule that stands in where a backward cannot be split
    holds_whole_batch: bool = False  # all forwards of a step come before its first backward
    warm_up: Callable[[int, int, int, int], int] | None = None  # forwards before one forward, one backward in turn
    ramp_bubble: bool = False  # idle for (p - 1) / v of a rank's work on one microbatch (arXiv 2104.04473, section 2.2)

    @property
    def splits_backward(self) -> bool:
        """Whether some backwards are done in two halves."""
        return self.whole_backward is not None

    def allows(self, virtual_stages: int) -> bool:
        """Whether a rank may hold so many stages."""
        return self.least_stages <= virtual_stages and (self.most_stages is None or virtual_stages <= self.most_stages)


SCHEDULES: dict[ScheduleName, ScheduleTraits] = {
    traits.name: traits
    for traits in (
        ScheduleTraits(name="gpipe", builder=gpipe, holds_whole_batch=True, ramp_bubble=True),
        ScheduleTraits(name="1f1b", builder=one_f_one_b, warm_up=one_f_one_b_warm_up, ramp_bubble=True),
        ScheduleTraits(
            name="interleaved_1f1b",
            builder=interleaved_1f1b,
            most_stages=None,
            usual_stages=2,
            warm_up=interleaved_warm_up,
            ramp_bubble=True,
        ),
        ScheduleTraits(
            name="looped_bfs",
            builder=looped_bfs,
            most_stages=None,
            usual_stages=2,
            single_stage="gpipe",
            holds_whole_batch=True,
        ),
        ScheduleTraits(name="zb_h1", builder=zb_h1, whole_backward="1f1b"),
        ScheduleTraits(
            name="interleaved_zb",
            builder=interleaved_zb,
            most_stages=None,
            usual_stages=2,
            single_stage="zb_h1",
            whole_backward="interleaved_1f1b",
        ),
        ScheduleTraits(
            name="zb_v",
            builder=zb_v,
            least_stages=2,
            most_stages=2,
            usual_stages=2,
            v_shaped=True,
            whole_backward="interleaved_1f1b",
        ),
        ScheduleTraits(
            name="dualpipe_v",
            builder=dualpipe_v,
            least_stages=2,
            most_stages=2,
            usual_stages=2,
            v_shaped=True,
            whole_backward="interleaved_1f1b",
        ),
        ScheduleTraits(name="naive", builder=naive, most_stages=None),
    )
}


def schedule_traits(name: str) -> ScheduleTraits:
    """The traits of the schedule of this name. Raises ScheduleError where there is none."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name}: unknown; known are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]

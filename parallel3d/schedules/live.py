"""How many forwards a pipeline rank has alive, which is what its activations are counted by. No torch here.

A forward is alive from its action until the backward of the same stage and microbatch is done; where the backward is
split, until its second half is done.
"""

from __future__ import annotations

from functools import lru_cache

from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.classic import groups
from parallel3d.schedules.registry import ScheduleName, schedule_traits


def live_microbatches(name: ScheduleName, *, pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """`Schedule.peak_live_microbatches` of one rank, without building a long schedule: the most forwards, each of one
    of the rank's stages, that are alive at once."""
    traits = schedule_traits(name)
    if traits.holds_whole_batch:
        return microbatches * virtual_stages
    if traits.warm_up is not None:
        return min(traits.warm_up(pp, rank, microbatches, virtual_stages) + 1, microbatches * virtual_stages)
    return _peaks(name, pp, min(microbatches, 4 * pp), virtual_stages)[rank]


def live_with_all_gradients(
    name: ScheduleName, *, pp: int, rank: int, microbatches: int, virtual_stages: int
) -> int | None:
    """The most forwards that a rank has alive once each of its stages has had a backward and none its last one: all
    gradients of the rank are in memory then and none is reduced. None where no such moment comes or is known."""
    traits, group_sizes = schedule_traits(name), groups(pp, microbatches)
    if microbatches == 1 or (virtual_stages > 1 and (len(group_sizes) == 1 or traits.holds_whole_batch)):
        return None
    backwards = (virtual_stages - 1) * group_sizes[0] + 1  # the first group's, down to the first one of the first stage
    left = microbatches * virtual_stages - backwards
    if traits.holds_whole_batch:
        return left
    return None if traits.warm_up is None else min(traits.warm_up(pp, rank, microbatches, virtual_stages) + 1, left)


@lru_cache(maxsize=1024)
def _peaks(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    schedule = build_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages, check=False)
    return schedule.peak_live_microbatches

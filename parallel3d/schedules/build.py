"""Builds schedules by name and counts the microbatches that a rank holds, without torch.

A microbatch is live on a stage from its forward action until its backward action is done, or until
the second half if the backward pass is split. Live microbatches determine activation memory.
"""

from __future__ import annotations

from functools import lru_cache

from parallel3d.errors import ScheduleError
from parallel3d.schedules.classic import Actions, groups
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Action, Kind, Schedule, peak_live


def build_schedule(
    name: ScheduleName, *, pp: int, microbatches: int, virtual_stages: int = 1
) -> Schedule:
    """Builds a pipeline schedule.

    Args:
        name: Schedule, for example "1f1b", "interleaved_1f1b" or "zb_h1".
        pp: Number of pipeline ranks.
        microbatches: Number of microbatches per step.
        virtual_stages: Stages per rank.

    Returns:
        Schedule of all ranks, valid by construction.

    Raises:
        ScheduleError: The name is unknown, or the numbers do not suit the schedule.

    Example:
        >>> schedule = parallel3d.build_schedule("1f1b", pp=2, microbatches=3)
        >>> print(schedule)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    traits = schedule_traits(name)
    least = traits.stages.least
    most = traits.stages.most
    if pp < 1 or microbatches < 1 or not traits.stages.allow(virtual_stages):
        limit = "" if most is None else f" (at most {most})"
        raise ScheduleError(
            f"schedule {name}: pp = {pp}, {microbatches} microbatches, {virtual_stages} stages "
            f"per rank: must be at least 1, 1 and {least}{limit}"
        )
    ranks = [tuple(traits.builder(pp, rank, microbatches, virtual_stages)) for rank in range(pp)]
    return Schedule(
        name=name,
        placement=placement(name, pp=pp, virtual_stages=virtual_stages),
        microbatches=microbatches,
        ranks=tuple(ranks),
    )


@lru_cache(maxsize=1024)
def placement(name: ScheduleName, *, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the rank of each stage: looped over the ranks, or down and up again in a V."""
    if schedule_traits(name).stages.v_shaped:
        return (*range(pp), *reversed(range(pp)))
    return tuple(range(pp)) * virtual_stages


@lru_cache(maxsize=64)
def forward_only(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Builds a schedule of forward passes only, for evaluation and generation.

    With at least pp microbatches no schedule takes fewer time steps: v m + p - 1 for looped stages
    and 2 (m + p - 1) for V-shaped ones, with v stages per rank, m microbatches and p ranks.

    Args:
        placement: Rank of each stage, as in the training schedule.
        microbatches: Number of microbatches.

    Example:
        >>> print(parallel3d.forward_only(placement=(0, 1), microbatches=2))
        0F0 0F1
        1F0 1F1
    """
    pp = max(placement) + 1
    stages = range(len(placement))
    is_looped = placement == placement[:pp] * (len(placement) // pp)
    rounds = groups(pp, microbatches) if is_looped else [range(microbatches)]
    forwards: Actions = []
    for group in rounds:
        for stage in stages:
            forwards += [Action(stage, Kind.FORWARD, m) for m in group]
    if not is_looped:
        # On a V the two stages of a rank are an odd number of steps apart, so their actions
        # alternate without conflict.
        forwards.sort(key=lambda action: 2 * action.microbatch + action.stage)
    ranks: list[Actions] = [[] for _ in range(pp)]
    for action in forwards:
        ranks[placement[action.stage]].append(action)
    return Schedule(
        name="forward_only",
        placement=placement,
        microbatches=microbatches,
        ranks=tuple(map(tuple, ranks)),
        trains=False,
    )


@lru_cache(maxsize=1024)
def live_microbatches(
    name: ScheduleName, *, pp: int, rank: int, microbatches: int, virtual_stages: int
) -> int:
    """Returns the largest number of live (stage, microbatch) pairs on one rank.

    Equals `Schedule.peak_live_microbatches[rank]`, without building the full schedule.
    """
    traits = schedule_traits(name)
    if traits.holds_whole_batch:
        return microbatches * virtual_stages
    if traits.warm_up is not None:
        warm_up = traits.warm_up(pp, rank, microbatches, virtual_stages)
        return min(warm_up + 1, microbatches * virtual_stages)
    few = min(microbatches, 4 * pp)  # More microbatches do not increase the peak.
    return peak_live(traits.builder(pp, rank, few, virtual_stages))

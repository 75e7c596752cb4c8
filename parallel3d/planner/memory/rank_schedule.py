"""What a pipeline rank has at hand when each of its actions begins, counted from the schedule that
is executed: forwards that wait for their backward, and stages with gradients or gathered
parameters."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.build import placement
from parallel3d.schedules.classic import group_sizes
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Kind


class StageProgress(NamedTuple):
    """How far a stage is: forwards without a backward, delayed second halves of backwards, and
    whether (1 or 0) its parameters are gathered and it has gradients."""

    alive: int = 0
    delayed: int = 0
    gathered: int = 0
    gradients: int = 0

    def after(self, kind: Kind, *, is_last: bool, frees_each: bool) -> StageProgress:
        """Returns the progress after an action."""
        if kind is Kind.FORWARD:
            return self._replace(alive=self.alive + 1, gathered=1)
        is_gathered = int(not frees_each and not is_last)
        if kind is Kind.WEIGHT:
            return StageProgress(self.alive, self.delayed - 1, is_gathered, 1)
        is_half = int(kind is Kind.INPUT)
        gradients = max(self.gradients, 1 - is_half)
        return StageProgress(self.alive - 1, self.delayed + is_half, is_gathered, gradients)


class BeforeAction(NamedTuple):
    """Before an action of a stage."""

    kind: Kind
    stage: int  # an index of the rank's own stages, from 0
    is_last: bool  # the stage's gradients are complete when the action ends
    has_gradients: bool  # of this stage
    is_gathered: bool
    counts: tuple[int, ...] = ()  # the progress of one stage after the other


@lru_cache(maxsize=8192)
def moments_of_schedule(
    name: ScheduleName,
    pp: int,
    rank: int,
    microbatches: int,
    virtual_stages: int,
    *,
    frees_each: bool,
) -> tuple[tuple[tuple[BeforeAction, ...], ...], int]:
    """Returns groups of moments that differ in the counts alone, and the tensors that the rank has
    at most between stages (`pipeline.transport`). `frees_each`: parameters are freed after each
    backward."""
    few = _enough_microbatches(name, pp, microbatches, virtual_stages)
    actions = schedule_traits(name).builder(pp, rank, few, virtual_stages)
    holders = placement(name, pp=pp, virtual_stages=virtual_stages)
    own = [stage for stage, holder in enumerate(holders) if holder == rank]
    lasts = {action.stage: action for action in actions if action.kind is not Kind.FORWARD}
    progress = {stage: StageProgress() for stage in own}
    found: dict[BeforeAction, dict[tuple[int, ...], None]] = {}
    for action in actions:
        stage = action.stage
        is_last = lasts[stage] == action
        before = progress[stage]
        counts = tuple(number for each in progress.values() for number in each)
        moment = BeforeAction(
            action.kind,
            own.index(stage),
            is_last,
            bool(before.gradients),
            bool(before.gathered),
        )
        found.setdefault(moment, {})[counts] = None
        progress[stage] = before.after(action.kind, is_last=is_last, frees_each=frees_each)
    groups = []
    for moment, every in found.items():
        groups.append(tuple(moment._replace(counts=counts) for counts in every))
    return tuple(groups), _in_flight(rank, holders, microbatches)


def _in_flight(rank: int, holders: tuple[int, ...], microbatches: int) -> int:
    """Returns how many activations and gradients are sent and received at once, at most."""
    neighbours: dict[int, int] = {}  # stages next to those of each other rank
    for stage, holder in enumerate(holders):
        for other in holders[max(0, stage - 1) : stage + 2]:
            if holder == rank != other:
                neighbours[other] = neighbours.get(other, 0) + 1
    return sum(
        min(SENDS_KEPT, count * microbatches) + min(RECEIVES_AHEAD, count * microbatches)
        for count in neighbours.values()
    )


def _enough_microbatches(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int
) -> int:
    """So few as hold as much: the others are the same again."""
    traits = schedule_traits(name)
    if traits.holds_whole_batch:
        return microbatches
    if traits.stages.v_shaped:
        return min(microbatches, 4 * pp + 2)
    if virtual_stages == 1:
        return min(microbatches, 2 * pp + 2)
    first, _ = group_sizes(pp, microbatches)
    is_alike = group_sizes(pp, 2 * first) == (first, first)
    if is_alike:
        return min(microbatches, 2 * first)
    return microbatches

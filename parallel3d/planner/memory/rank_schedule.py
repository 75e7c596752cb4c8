"""What a pipeline rank has at hand when each of its actions begins, counted from the schedule that
is executed: forwards that wait for their backward, stages with gradients or gathered parameters,
activations between stages."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.build import placement, rank_actions
from parallel3d.schedules.classic import groups as groups_of
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Kind


class StageProgress(NamedTuple):
    """How far a stage is: forwards without a backward, delayed second halves of backwards, and
    whether (1 or 0) its parameters are gathered, its last action was a backward that freed them,
    and which of its gradients exist: those of first halves of backwards alone, all, or all of them
    complete."""

    alive: int = 0
    delayed: int = 0
    gathered: int = 0
    freed: int = 0
    halves: int = 0
    whole: int = 0
    complete: int = 0

    def after(self, kind: Kind, *, is_last: bool, frees_each: bool) -> StageProgress:
        """Returns the progress after an action."""
        if kind is Kind.FORWARD:
            return self._replace(alive=self.alive + 1, gathered=1, freed=0)
        if is_last:
            return StageProgress(complete=1)
        if kind is Kind.WEIGHT:
            return self._replace(delayed=self.delayed - 1, halves=0, whole=1)
        is_half = kind is Kind.INPUT
        return StageProgress(
            alive=self.alive - 1,
            delayed=self.delayed + is_half,
            gathered=int(not frees_each),
            freed=int(frees_each),
            halves=int(is_half and not self.whole),
            whole=int(self.whole or not is_half),
        )


class BeforeAction(NamedTuple):
    """Before an action of a stage. `in_flight` counts activations and gradients between stages,
    beside the inputs of forwards that wait."""

    kind: Kind
    stage: int  # an index of the rank's own stages, from 0
    is_last: bool  # the stage's gradients are complete when the action ends
    own: StageProgress  # of this stage, without its counts of microbatches
    stages: tuple[int, ...]  # the progress of one stage after the other
    in_flight: int


@lru_cache(maxsize=8192)
def grouped_moments(
    name: ScheduleName,
    pp: int,
    rank: int,
    microbatches: int,
    virtual_stages: int,
    *,
    frees_each: bool,
) -> tuple[tuple[tuple[BeforeAction, ...], ...], int]:
    """Returns groups of moments that differ in what the rank holds of all stages alone, and the
    tensors that it has at last to receive others into (`pipeline.transport`). `frees_each`:
    parameters are freed after each backward."""
    few = _enough_microbatches(name, pp, microbatches, virtual_stages)
    actions = rank_actions(name, rank=rank, microbatches=few, pp=pp, virtual_stages=virtual_stages)
    holders = placement(name, pp=pp, virtual_stages=virtual_stages)
    own = [stage for stage, holder in enumerate(holders) if holder == rank]
    lasts = set(
        {
            action.stage: action
            for action in actions
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT)
        }.values()
    )
    around = Counter[int]()  # stages next to those of each other rank
    receiving = []
    for at, stage in enumerate(own):
        for other in (stage - 1, stage + 1):
            if 0 <= other < len(holders) and holders[other] != rank:
                around[holders[other]] += 1
                if other < stage:
                    receiving.append(at)
    most_sent = sum(min(SENDS_KEPT, count * microbatches) for count in around.values())
    # Receives that are posted, and what an action has taken (`pipeline.transport`).
    posted = sum(min(RECEIVES_AHEAD, count * few) for count in around.values())
    progress = [StageProgress()] * len(own)
    numbers = [0] * len(StageProgress._fields) * len(own)
    found = []
    sent = 0
    most_held = 0
    for action in actions:
        at = own.index(action.stage)
        is_last = action in lasts
        held = sum(progress[stage].alive for stage in receiving)
        most_held = max(most_held, held)
        before = progress[at]._replace(alive=0, delayed=0)
        in_flight = min(sent, most_sent) - held
        found.append((action.kind, at, is_last, before, tuple(numbers), in_flight))
        progress[at] = progress[at].after(action.kind, is_last=is_last, frees_each=frees_each)
        numbers[at * len(before) : (at + 1) * len(before)] = progress[at]
        target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        is_inside = 0 <= target < len(holders)
        if action.kind is not Kind.WEIGHT and is_inside and holders[target] != rank:
            sent += 1
    pool = most_held + posted
    groups: dict[tuple[object, ...], list[BeforeAction]] = {}
    for kind, at, is_last, before, counts, in_flight in dict.fromkeys(found):
        moment = BeforeAction(kind, at, is_last, before, counts, in_flight + pool)
        groups.setdefault((kind, at, is_last, before), []).append(moment)
    return tuple(map(tuple, groups.values())), pool


def _enough_microbatches(
    name: ScheduleName, pp: int, microbatches: int, virtual_stages: int
) -> int:
    """So few as hold as much: the others are the same again."""
    traits = schedule_traits(name)
    if traits.holds_whole_batch:
        return microbatches
    if traits.stages.v_shaped or virtual_stages == 1:
        return min(microbatches, (4 if traits.stages.v_shaped else 2) * pp + 2)
    first = groups_of(pp, microbatches)[0]
    return min(microbatches, 2 * first) if groups_of(pp, 2 * first) == [first] * 2 else microbatches

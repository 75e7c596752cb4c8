"""Live microbatches of a pipeline rank before and after each backward pass, counted from the
schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Kind

NUMBERS = 6  # In a stage's state.
COMPLETE = (0, 0, 0, 0, 1, 0)  # State of a stage after its last backward pass.
# Change of the first two numbers in a stage's state (`Backward`), keyed by the kind of action.
_CHANGES = {
    Kind.FORWARD: (1, 0),
    Kind.BACKWARD: (-1, 0),
    Kind.INPUT: (-1, 1),
    Kind.WEIGHT: (0, -1),
}


class Backward(NamedTuple):
    """A backward pass, or half of one, in a stage of a rank, and the state of the rank before and
    after it.

    The state has six numbers per stage: live microbatches before their backward pass, live
    microbatches between the two halves of it, and four flags: parameters are all-gathered, the
    gradients are incomplete, the gradients are complete, only input-gradient halves made gradients.
    """

    stage: int  # Index of the stage among those of the rank.
    kind: Kind
    is_last: bool  # True for the last pass of the stage that computes weight gradients
    has_gradients: int  # 1 if an earlier pass left gradients in the stage, else 0
    before: tuple[int, ...]
    after: tuple[int, ...]

    def waiting(self) -> int:
        """Returns the number of live (stage, microbatch) pairs before the backward pass."""
        return sum(self.before[0::NUMBERS]) + self.halved()

    def halved(self) -> int:
        """Returns the number of those that are between the halves of their backward pass."""
        return sum(self.before[1::NUMBERS])


@lru_cache(maxsize=8192)
def fullest_backwards(
    name: ScheduleName,
    pp: int,
    rank: int,
    microbatches: int,
    virtual_stages: int,
    *,
    frees_each: bool,
) -> tuple[Backward, ...]:
    """Returns the backward passes with the most live microbatches.

    There is one for each stage, kind, `is_last` and `has_gradients`. With `frees_each`, parameters
    are freed after each backward pass.
    """
    traits = schedule_traits(name)
    if not traits.holds_whole_batch:  # More microbatches do not increase the peak.
        microbatches = min(microbatches, 4 * pp + microbatches % pp)
    stages: list[tuple[int, ...]] = [(0,) * NUMBERS] * virtual_stages
    left = [microbatches] * virtual_stages
    fullest: dict[object, Backward] = {}
    for stage_of_model, kind, _ in traits.builder(pp, rank, microbatches, virtual_stages):
        stage = stage_of_model // pp  # Each rank has one of every pp stages.
        live, halved, gathered, gradients, _, ends = stages[stage]
        before = sum(stages, ())
        more_live, more_halved = _CHANGES[kind]
        adds = kind in (Kind.BACKWARD, Kind.WEIGHT)
        left[stage] -= adds
        is_last = adds and not left[stage]
        live += more_live
        halved += more_halved
        if kind is Kind.FORWARD:
            gathered = 1
        elif kind is not Kind.WEIGHT and frees_each:
            gathered = 0
        ends = int((ends or kind is Kind.INPUT) and not (gradients or adds))
        stages[stage] = (live, halved, gathered, int(gradients or adds), 0, ends)
        if is_last and kind is Kind.BACKWARD:
            stages[stage] = COMPLETE
        if kind is not Kind.FORWARD:
            found = Backward(
                stage,
                kind,
                is_last,
                gradients,
                before,
                sum(stages, ()),
            )
            same = (*found[:4], found.before[3::NUMBERS])
            # Recomputed blocks save less before their backward pass than between its halves.
            counts = [Backward.waiting, Backward.halved][: 1 + traits.splits_backward]
            for count in counts:
                most = fullest.setdefault((count, same), found)
                if count(found) > count(most):
                    fullest[count, same] = found
        if is_last:
            stages[stage] = COMPLETE
    return tuple(dict.fromkeys(fullest.values()))

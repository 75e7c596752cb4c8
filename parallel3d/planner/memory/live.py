"""Live microbatches of a pipeline rank before and after each backward pass, counted from the
schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Kind

# Change of the first two numbers of a stage's state, keyed by the kind of action.
_CHANGES = {
    Kind.FORWARD: (1, 0),
    Kind.BACKWARD: (-1, 0),
    Kind.INPUT: (-1, 1),
    Kind.WEIGHT: (0, -1),
}


class StageState(NamedTuple):
    """Numbers of a stage that its memory depends on."""

    waiting: int = 0  # live microbatches before their backward pass
    halved: int = 0  # live microbatches between the halves of their backward pass
    is_used: int = 0  # 1 from the first forward pass to the last backward pass
    is_gathered: int = 0  # 1 from a forward pass to the next backward pass
    is_incomplete: int = 0  # 1 between the first and the last pass that makes weight gradients
    is_complete: int = 0  # 1 after the last one
    has_ends: int = 0  # 1 if only input-gradient halves have made weight gradients


COMPLETE = StageState(is_complete=1)


class Backward(NamedTuple):
    """A backward pass, or half of one, in a stage of a rank, and the state of the rank before and
    after it."""

    stage: int  # Index of the stage among those of the rank.
    kind: Kind
    is_last: bool  # True for the last pass of the stage that computes weight gradients
    has_gradients: int  # 1 if an earlier pass left gradients in the stage, else 0
    before: tuple[StageState, ...]
    after: tuple[StageState, ...]
    live: int  # Number of live (stage, microbatch) pairs before the backward pass.


@lru_cache(maxsize=8192)
def fullest_backwards(
    name: ScheduleName, pp: int, rank: int, microbatches: int, virtual_stages: int
) -> tuple[Backward, ...]:
    """Returns the backward passes with the most live microbatches.

    There is one for each stage, kind, `is_last` and `has_gradients`.
    """
    traits = schedule_traits(name)
    if not traits.holds_whole_batch:  # More microbatches do not increase the peak.
        microbatches = min(microbatches, 4 * pp + microbatches % pp)
    stages = [StageState()] * virtual_stages
    left = [microbatches] * virtual_stages
    all_live = all_halved = 0
    incomplete = 0  # Bit of each stage that has added weight gradients, but not all.
    most: dict[object, int] = {}
    fullest: dict[object, Backward] = {}
    for stage_of_model, kind, _ in traits.builder(pp, rank, microbatches, virtual_stages):
        stage = stage_of_model // pp  # Each rank has one of every pp stages.
        waiting, halved, _, gathered, gradients, _, ends = stages[stage]
        before = tuple(stages)
        more_waiting, more_halved = _CHANGES[kind]
        adds = kind in (Kind.BACKWARD, Kind.WEIGHT)
        left[stage] -= adds
        is_last = adds and not left[stage]
        if kind is Kind.FORWARD:
            gathered = 1
        elif kind is not Kind.WEIGHT:
            gathered = 0
        ends = int((ends or kind is Kind.INPUT) and not (gradients or adds))
        stages[stage] = StageState(
            waiting + more_waiting,
            halved + more_halved,
            is_used=1,
            is_gathered=gathered,
            is_incomplete=int(gradients or adds),
            has_ends=ends,
        )
        if is_last and kind is Kind.BACKWARD:
            stages[stage] = COMPLETE
        if kind is not Kind.FORWARD:
            # Recomputed blocks save less before their backward pass than between its halves.
            for kept, count in enumerate((all_live, all_halved)[: 1 + traits.splits_backward]):
                same = (kept, stage, kind, is_last, gradients, incomplete)
                if count > most.get(same, -1):
                    most[same] = count
                    fullest[same] = Backward(*same[1:5], before, tuple(stages), all_live)
            incomplete |= adds << stage
        if is_last:
            stages[stage] = COMPLETE
            incomplete ^= 1 << stage
        all_live += more_waiting + more_halved
        all_halved += more_halved
    return tuple(dict.fromkeys(fullest.values()))

"""Live microbatches of a pipeline rank before and after each backward pass, counted from the
schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Kind

COMPLETE = (0, 0, 0, 0, 1)  # State of a stage after its last backward pass.
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

    The state has five numbers per stage: live microbatches before their backward pass, live
    microbatches between the two halves of it, and three flags: there are live microbatches, the
    gradients are incomplete, the gradients are complete.
    """

    stage: int  # Index of the stage among those of the rank.
    kind: Kind
    is_last: bool  # True for the last pass of the stage that computes weight gradients
    has_gradients: int  # 1 if an earlier pass left gradients in the stage, else 0
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def waiting(self) -> int:
        """Number of live (stage, microbatch) pairs before the backward pass."""
        return sum(self.before[0::5]) + sum(self.before[1::5])


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
    stages = [(0, 0, 0, 0, 0)] * virtual_stages
    left = [microbatches] * virtual_stages
    fullest: dict[object, Backward] = {}
    for stage_of_model, kind, _ in traits.builder(pp, rank, microbatches, virtual_stages):
        stage = stage_of_model // pp  # Each rank has one of every pp stages.
        live, halved, _, gradients, _ = stages[stage]
        before = sum(stages, ())
        more_live, more_halved = _CHANGES[kind]
        adds = kind in (Kind.BACKWARD, Kind.WEIGHT)
        left[stage] -= adds
        is_last = adds and not left[stage]
        live += more_live
        halved += more_halved
        is_busy = live + halved > 0 or kind is Kind.WEIGHT
        stages[stage] = (live, halved, int(is_busy), int(gradients or adds), 0)
        if is_last and kind is Kind.BACKWARD:
            stages[stage] = COMPLETE
        if kind is not Kind.FORWARD:
            found = Backward(stage, kind, is_last, gradients, before, sum(stages, ()))
            same = (*found[:4], found.before[3::5])
            if same not in fullest or found.waiting > fullest[same].waiting:
                fullest[same] = found
        if is_last:
            stages[stage] = COMPLETE
    return tuple(fullest.values())

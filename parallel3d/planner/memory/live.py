"""Live microbatches of a pipeline rank before and after each backward pass, counted from the
schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Kind

COMPLETE = (0, 0, 0, 0, 1)
# Change of the first two numbers of a stage (`Backward`) by each action.
_CHANGES = {
    Kind.FORWARD: (1, 0),
    Kind.BACKWARD: (-1, 0),
    Kind.INPUT: (-1, 1),
    Kind.WEIGHT: (0, -1),
}


class Backward(NamedTuple):
    """A backward pass of one of a rank's stages, or half of one, with the live state before and
    after.

    The state has five numbers for each stage: microbatches before their backward pass, microbatches
    between the two halves of it, and three flags: the stage has either of these, it has incomplete
    gradients, it has complete gradients.
    """

    stage: int  # index among the rank's stages
    kind: Kind
    is_last: bool  # True for the last one of the stage
    has_gradients: int  # 1 if the stage has gradients before it, else 0
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def waiting(self) -> int:
        """Live microbatches of all stages."""
        return sum(self.before[0::5]) + sum(self.before[1::5])


@lru_cache(maxsize=8192)
def fullest_backwards(
    name: ScheduleName, pp: int, rank: int, microbatches: int, virtual_stages: int
) -> tuple[Backward, ...]:
    """Returns up to three backward passes of each stage and kind.

    They are the first, the last, and the one between them with most live microbatches.
    """
    traits = schedule_traits(name)
    if not traits.holds_whole_batch:  # more microbatches do not increase the peak
        microbatches = min(microbatches, 4 * pp + microbatches % pp)
    stages = [(0, 0, 0, 0, 0)] * virtual_stages
    left = [microbatches] * virtual_stages
    fullest: dict[object, Backward] = {}
    for stage_of_model, kind, _ in traits.builder(pp, rank, microbatches, virtual_stages):
        stage = stage_of_model // pp  # each rank has one of every pp stages
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
            found = Backward(
                stage,
                kind,
                is_last,
                gradients,
                before,
                sum(stages, ()),
            )
            same = found[:4]
            if same not in fullest or found.waiting > fullest[same].waiting:
                fullest[same] = found
        if is_last:
            stages[stage] = COMPLETE
    return tuple(fullest.values())

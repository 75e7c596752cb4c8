"""What waits on a pipeline rank before and after each of its backward passes, counted from the
schedule that is executed."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import Kind

COMPLETE = (0, 0, 0, 0, 1)
# What an action changes in the first two numbers of a stage (`Backward`).
_CHANGES = {
    Kind.FORWARD: (1, 0),
    Kind.BACKWARD: (-1, 0),
    Kind.INPUT: (-1, 1),
    Kind.WEIGHT: (0, -1),
}


class Backward(NamedTuple):
    """A backward pass of one of a rank's stages, or a half of it, and what waits before and after.

    What waits is five numbers for each stage of the rank: microbatches without a backward pass,
    microbatches between the halves of theirs, and 1 or 0 for having either of these, for having
    gradients that are incomplete, and for having complete ones."""

    stage: int  # an index of the rank's own stages
    kind: Kind
    is_last: bool  # of the stage
    has_gradients: int  # 1 or 0, of the stage, before
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def waiting(self) -> int:
        """Microbatches of all stages that wait."""
        return sum(self.before[0::5]) + sum(self.before[1::5])


@lru_cache(maxsize=8192)
def fullest_backwards(
    name: ScheduleName, pp: int, rank: int, microbatches: int, virtual_stages: int
) -> tuple[Backward, ...]:
    """Returns a few backward passes of a rank: of each stage and kind the first, the last and one
    more, each the one before which most microbatches wait."""
    traits = schedule_traits(name)
    if not traits.holds_whole_batch:  # more microbatches hold no more
        microbatches = min(microbatches, 4 * pp + microbatches % pp)
    stages = [(0, 0, 0, 0, 0)] * virtual_stages
    left = [microbatches] * virtual_stages
    fullest: dict[object, Backward] = {}
    for stage_of_model, kind, _ in traits.builder(pp, rank, microbatches, virtual_stages):
        stage = stage_of_model // pp  # every pp stages have one on each rank
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

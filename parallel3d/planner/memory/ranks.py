"""Peak memory of the pipeline ranks of a planned run."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from parallel3d.planner.memory.estimate import RankEstimate
from parallel3d.planner.memory.published import published_memory
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.schedules.registry import SCHEDULES


def memory_by_rank(run: PlannedRun) -> list[RankMemory]:
    """Returns the memory of each pipeline rank, which does not depend on the other axes."""
    return [rank_memory(run, rank) for rank in range(run.layout.pp)]


def needed_bytes(run: PlannedRun, ranks: Iterable[RankMemory]) -> float:
    """Returns the highest peak of `ranks`. Except for parallel3d, it excludes fragmentation, which
    the allocator can free."""
    freed = 0 if run.framework.is_parallel3d else 1
    return max(memory.total - freed * memory.fragmentation for memory in ranks)


def worst_rank(run: PlannedRun, *, enough: float = inf) -> RankMemory:
    """Returns the memory of the rank with the highest peak, or of the first rank found with more
    than `enough` bytes."""
    worst = rank_memory(run, 0)
    for rank in _candidates(run):
        if worst.total > enough:
            break
        worst = max(worst, rank_memory(run, rank), key=lambda memory: memory.total)
    return worst


def _candidates(run: PlannedRun) -> Iterable[int]:
    """Returns the ranks that can have a higher peak than rank 0.

    If the first ranks hold the most microbatches, only the second, the last and the first with the
    most layers can. With `every_n` recompute, ranks with the same number of layers differ.
    """
    layout = run.layout
    traits = SCHEDULES.get(layout.schedule)
    last = layout.pp - 1
    is_uneven = layout.stage_boundaries or layout.recompute_every > 1
    if is_uneven or traits is None or traits.splits_backward:
        return range(1, layout.pp)
    layers = [part.layers for part in run.ranks]
    return {min(1, last), layers.index(max(layers)), last} - {0}


def rank_memory(run: PlannedRun, rank: int) -> RankMemory:
    """Returns the memory of a rank, corrected by runs measured on the cluster (`Scales`)."""
    if run.framework.is_parallel3d:
        memory = RankEstimate(run, rank).peak()
    else:
        memory = published_memory(run, rank)
    return memory.with_beside_states(run.cluster.scales.memory)

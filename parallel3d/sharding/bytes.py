"""When parameters are freed. The trainer and the planner both use it, so it needs no torch."""

from __future__ import annotations

from parallel3d.config.sharding_strategies import FREED_BETWEEN_USES, Cadence, ShardingName


def frees_after_forward(strategy: ShardingName, gather: Cadence, microbatches: int) -> bool:
    """Returns whether a block's gathered parameters are freed after its forward, and gathered again
    for its backward.

    `microbatches` are those of a step; a pipeline, which keeps a stage's parameters even for one,
    counts at least two.
    """
    return strategy in FREED_BETWEEN_USES and (gather == "microbatch" or microbatches == 1)

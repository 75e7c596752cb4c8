"""When parameters are freed, and which units share a bucket. The trainer and the planner both use
it, so it needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.config.sharding_strategies import FREED_BETWEEN_USES, Cadence, ShardingName


def frees_after_forward(strategy: ShardingName, gather: Cadence, microbatches: int) -> bool:
    """Returns whether a block's gathered parameters are freed after its forward, and gathered again
    for its backward.

    `microbatches` are those of a step; a pipeline, which keeps a stage's parameters even for one,
    counts at least two.
    """
    return strategy in FREED_BETWEEN_USES and (gather == "microbatch" or microbatches == 1)


def bucket_borders(numels: Sequence[int], least: int) -> list[range]:
    """Returns the neighbouring units of each bucket, in order: counted from the last unit, a bucket
    is full as soon as its units have `least` parameters together."""
    borders: list[range] = []
    end = len(numels)
    while end:
        begin, held = end - 1, numels[end - 1]
        while begin and held < least:
            begin -= 1
            held += numels[begin]
        borders.insert(0, range(begin, end))
        end = begin
    return borders

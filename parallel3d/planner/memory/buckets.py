"""What NO_SHARD and SHARD_OPTIMIZER hold to send gradients: the buckets of a stage, two of them under way at once.

A bucket of neighbouring units (what no block holds, each block, the last norm, the head) is sent when the last backward
has gone through its blocks, after the bucket sent two before it has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.planner.model.parameters import block_tables, end_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import master_bytes
from parallel3d.sharding.bytes import bucket_borders


@dataclass(frozen=True)
class GradientBucket:
    """Bytes of one bucket of gradients."""

    before: int  # blocks of the stage that have had no backward when it is sent
    memory: float  # its gradients
    copied: float  # what is made to send them
    packing: float  # that, while it is being filled
    publishing: float  # its stepped parameters, which come back from other ranks
    stepping: int  # numbers of its largest parameter that are stepped here
    blocks: range  # whose gradients it holds


def buckets_of(run: PlannedRun, part: StageSlice) -> tuple[GradientBucket, ...]:
    """The buckets of a stage, the first to be sent first."""
    layout, master = run.layout, master_bytes(run.precision)
    is_split = layout.strategy == "SHARD_OPTIMIZER" and layout.dp_shard > 1
    sizes = (master, layout.reduce_bytes if layout.dp > 1 else 0, int(run.item_bytes), layout.bucket_bytes)
    shards = layout.dp_shard if is_split else 1
    # On one data rank fully_shard's units are those of buckets, and what no block holds is one of them.
    return _buckets(run.shape, part, layout.tp, shards, sizes, together=layout.strategy not in REPLICATED)


@lru_cache(maxsize=1024)
def _buckets(
    shape: ModelShape, part: StageSlice, tp: int, shards: int, sizes: tuple[int, int, int, int], *, together: bool
) -> tuple[GradientBucket, ...]:
    master, reduce, item, bucket_bytes = sizes
    first = end_tables(shape, StageSlice(layers=0, embedding=part.embedding, head=together and part.head), tp)
    last = end_tables(shape, part, tp)[len(first) :]
    units = [(0, first)] if first else []
    units += [(index, block_tables(shape, tp)) for index in range(part.layers)]
    units += [(part.layers, (table,)) for table in last]
    borders = bucket_borders([sum(table.numel for table in unit) for _, unit in units], bucket_bytes // master)
    found = []
    for border in reversed(borders):
        tables = [table for index in border for table in units[index][1]]
        numel = sum(table.numel for table in tables)
        packed = sum(table.shard(shards) for table in tables) * shards
        is_other, is_even = reduce != master, all(table.rows % shards == 0 for table in tables)
        copied = packing = float(reduce * numel * is_other)
        if shards > 1:  # even rows are packed in the gradients' dtype first
            copied = reduce * packed * (1 + 1 / shards)
            packing = float(reduce * packed + master * packed * (is_other and is_even))
        stepping = max(table.shard(shards) // table.times for table in tables)
        before = units[border[0]][0]
        blocks = range(before, units[border[-1]][0] + 1)
        publishing = float(item * packed * (shards > 1))
        found.append(GradientBucket(before, float(master * numel), copied, packing, publishing, stepping, blocks))
    return tuple(found)


def under_way(run: PlannedRun, part: StageSlice) -> float:
    """The last two buckets of a stage, which stay until all stages are done: their copies, and where a backward steps
    also the gradients, with what one step makes."""
    last = buckets_of(run, part)[-2:]
    copies = sum(bucket.copied for bucket in last)
    if not run.optimizer.steps_in_backward:
        return copies
    return (
        copies
        + sum(bucket.memory for bucket in last)
        + run.optimizer.step_bytes * max(bucket.stepping for bucket in last)
    )


def published_bytes(run: PlannedRun, part: StageSlice) -> float:
    """Returns the most bytes while stepped parameters come back, two buckets at once."""
    sizes = [bucket.publishing for bucket in buckets_of(run, part)]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], 0.0], strict=True)), default=0.0)

"""What NO_SHARD and SHARD_OPTIMIZER hold to send gradients: the buckets of a stage, two of them
under way at once.

A bucket of neighbouring units (the embedding, each block, the last norm with the head; both ends,
where they share a table) is sent when the last backward has gone through its blocks, after the
bucket sent two before it has arrived.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d.planner.model.parameters import block_tables, end_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import master_bytes
from parallel3d.sharding.bytes import bucket_borders


class GradientBucket(NamedTuple):
    """Bytes of one bucket of gradients."""

    before: int  # blocks of the stage that have had no backward when it is sent
    memory: float  # its gradients
    copied: float  # what is made to send them
    packing: float  # that, while it is being filled
    publishing: float  # its stepped parameters, which come back from other ranks


def buckets_of(run: PlannedRun, part: StageSlice) -> tuple[GradientBucket, ...]:
    """The buckets of a stage, the first to be sent first."""
    layout = run.layout
    master = master_bytes(run.precision)
    sizes = (
        master,
        layout.reduce_bytes if layout.dp > 1 else 0,
        int(run.item_bytes),
        run.bucket_bytes,
    )
    shards = layout.dp_shard if layout.strategy == "SHARD_OPTIMIZER" else 1
    return _buckets(run.shape, part, layout.tp, shards, sizes)


@lru_cache(maxsize=1024)
def _buckets(
    shape: ModelShape, part: StageSlice, tp: int, shards: int, sizes: tuple[int, int, int, int]
) -> tuple[GradientBucket, ...]:
    master, reduce, item, bucket_bytes = sizes
    is_tied = shape.tied_embeddings and part.embedding and part.head
    first = end_tables(shape, StageSlice(layers=0, embedding=part.embedding, head=is_tied), tp)
    last = end_tables(shape, part, tp)[len(first) :]
    units = [(0, first)] if first else []
    units += [(index, block_tables(shape, tp)) for index in range(part.layers)]
    units += [(part.layers, last)] if last else []
    borders = bucket_borders(
        [sum(table.numel for table in unit) for _, unit in units], bucket_bytes // master
    )
    found = []
    for border in reversed(borders):
        tables = [table for index in border for table in units[index][1]]
        numel = sum(table.numel for table in tables)
        packed = sum(table.shard(shards) for table in tables) * shards
        copied = packing = float(reduce * numel * (reduce != master))
        if shards > 1:  # even rows are packed in the gradients' dtype first
            is_even = all(table.rows % shards == 0 for table in tables)
            copied = reduce * packed * (1 + 1 / shards)
            packing = float(reduce * packed + master * packed * (reduce != master and is_even))
        publishing = float(item * packed * (shards > 1))
        found.append(
            GradientBucket(units[border[0]][0], master * numel, copied, packing, publishing)
        )
    return tuple(found)


def under_way(run: PlannedRun, part: StageSlice) -> float:
    """The last two buckets of a stage, which stay until all stages are done."""
    return sum(bucket.copied for bucket in buckets_of(run, part)[-2:])

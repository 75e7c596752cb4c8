"""What NO_SHARD and SHARD_OPTIMIZER hold to send gradients: a stage's buckets, two of them on their way at once.

As sharding/whole.py has them. Neighbouring units (what no block holds, each block, the last norm, the head) are one
bucket as soon as they have bucket_mib MiB together, counted from the last. A bucket is sent when the last backward has
gone through its blocks, after the one sent two before is done; one with what no block holds, when all is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.planner.job import Job
from parallel3d.planner.parameters import Table, block_tables, end_tables
from parallel3d.planner.shapes import ModelShape, StageSlice

Unit = tuple[Table, ...]


@dataclass(frozen=True)
class Sent:
    """Bytes of copies on their way when a bucket is sent, `before` blocks of its stage still being without a backward:
    its own and the last one's. `packing`: for the moment in which it is packed."""

    before: int
    bytes: float
    packing: float


def sent_by(job: Job, part: StageSlice) -> tuple[Sent, ...]:
    """For each bucket of a stage, the first to be sent first; the last one's stay until all stages are done."""
    found: list[Sent] = []
    last = 0.0
    for bucket in _of(job, part):
        held, packing = _copied(job, bucket)
        found.append(Sent(bucket.before, last + held, last + packing))
        last = held
    return tuple(found)


def published_by(job: Job, part: StageSlice) -> float:
    """Bytes at most while a stage's stepped parameters come back from the other ranks, two buckets at once."""
    if not _is_split(job):
        return 0.0
    sizes = [job.item_bytes * bucket.packed for bucket in _of(job, part)]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], 0.0], strict=True)), default=0.0)


@dataclass(frozen=True)
class _Bucket:
    before: int  # blocks
    numel: int
    packed: int  # numbers as ranks exchange them, uneven rows filled up
    is_even: bool


def _is_split(job: Job) -> bool:
    return job.layout.strategy == "SHARD_OPTIMIZER" and job.layout.dp_shard > 1


def _copied(job: Job, bucket: _Bucket) -> tuple[float, float]:
    """Bytes that are held until a bucket has arrived, and while it is packed: even rows in the gradients' dtype first,
    but not yet the rows that it arrives in."""
    layout, master = job.layout, _master_bytes(job)
    is_other = layout.reduce_bytes != master
    if not _is_split(job):
        held = float(is_other * layout.reduce_bytes * bucket.numel)
        return held, held
    packed = layout.reduce_bytes * bucket.packed
    first = master * bucket.packed * (is_other and bucket.is_even)
    return packed * (1 + 1 / layout.dp_shard), float(packed + first)


def _master_bytes(job: Job) -> int:
    return 2 if job.precision == "bf16_pure" else 4


def _of(job: Job, part: StageSlice) -> tuple[_Bucket, ...]:
    layout = job.layout
    least = layout.bucket_bytes // _master_bytes(job)
    return _buckets(job.shape, part, layout.tp, layout.dp_shard, least)


@lru_cache(maxsize=1024)
def _buckets(shape: ModelShape, part: StageSlice, tp: int, shards: int, least: int) -> tuple[_Bucket, ...]:
    """The bucket that is sent first first; of at least so many numbers, but for what is left for the last."""
    groups: list[list[tuple[int, Unit]]] = []
    held = least
    for before, unit in reversed(_units(shape, part, tp)):
        if held >= least:
            groups.append([])
            held = 0
        groups[-1].append((before, unit))
        held += sum(table.numel for table in unit)
    found = []
    for group in groups:
        tables = [table for _, unit in group for table in unit]
        found.append(
            _Bucket(
                before=group[-1][0],
                numel=sum(table.numel for table in tables),
                packed=sum(table.shard(shards) for table in tables) * shards,
                is_even=all(table.rows % shards == 0 for table in tables),
            )
        )
    return tuple(found)


def _units(shape: ModelShape, part: StageSlice, tp: int) -> list[tuple[int, Unit]]:
    """What no block holds, the blocks, the norm and the head, each with the blocks before it."""
    first = end_tables(shape, StageSlice(layers=0, embedding=part.embedding, head=False), tp)
    last = end_tables(shape, part, tp)[len(first) :]
    units: list[tuple[int, Unit]] = [(0, first)] if first else []
    units += [(index, block_tables(shape, tp)) for index in range(part.layers)]
    return units + [(part.layers, (table,)) for table in last]

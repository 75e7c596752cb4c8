"""What NO_SHARD and SHARD_OPTIMIZER hold to send gradients: a stage's buckets, two of them on their way at once.

As sharding/whole.py has them. Neighbouring units (what no block holds, each block, the last norm, the head) are one
bucket as soon as they have bucket_mib MiB together, counted from the last. A bucket is sent when the last backward has
gone through its blocks, after the one sent two before is done; one with what no block holds, when all is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from parallel3d.config.strategy import REPLICATED
from parallel3d.planner.model.parameters import Table, block_tables, end_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice

Unit = tuple[Table, ...]


@dataclass(frozen=True)
class Sent:
    """Bytes of copies on their way when a bucket is sent, `before` blocks of its stage still being without a backward:
    its own and the last one's. `packing`: for the moment in which it is packed."""

    before: int
    bytes: float
    packing: float


def sent_by(run: PlannedRun, part: StageSlice) -> tuple[Sent, ...]:
    """For each bucket of a stage, the first to be sent first; the last one's stay until all stages are done."""
    found: list[Sent] = []
    last = 0.0
    for bucket in _of(run, part):
        held, packing = _copied(run, bucket)
        found.append(Sent(bucket.before, last + held, last + packing))
        last = held
    return tuple(found)


@dataclass(frozen=True)
class Filled:
    """Bytes of buckets that exist while a backward fills them alone (`sharding.buckets`), at one of their units:
    `waits`, those that are there before its first gradient; `opens`, what that makes; with its last gradient, where it
    completes its bucket, at the most `finishes` while the parameters of a bucket are stepped, then `sends`."""

    waits: float = 0.0
    opens: float = 0.0
    finishes: float = 0.0
    sends: float = 0.0


@dataclass(frozen=True)
class Fillings:
    """Of a stage: of what no block holds, each block, the norm and the head; `left`: what is on its way when all are
    filled, `finishing`: while that arrives."""

    first: Filled
    blocks: tuple[Filled, ...]
    norm: Filled
    head: Filled
    left: float = 0.0
    finishing: float = 0.0


def filled_by(run: PlannedRun, part: StageSlice, step_bytes: float) -> Fillings:
    """`step_bytes`: what the optimizer makes for each number of the parameter that it is at."""
    nothing = Filled()
    if run.layout.strategy not in REPLICATED:
        return _filled_alone(run, part, step_bytes)
    found: list[Filled] = []
    under_way: list[_Sent] = []
    for bucket in _of(run, part):
        memory, step = float(_master_bytes(run) * bucket.numel), step_bytes * bucket.largest
        for at in range(bucket.units):
            found.append(Filled(_bytes(under_way) + memory * (at > 0), memory * (at == 0)))
        if run.layout.dp == 1:
            found[-1] = replace(found[-1], finishes=memory + step)
            continue
        copies, packing = _copied(run, bucket)
        finishes = memory + (_stepping(under_way) if len(under_way) == 2 else 0.0)
        under_way = under_way[-1:]
        sends = _bytes(under_way) + memory + max(copies, packing)
        found[-1] = replace(found[-1], finishes=finishes, sends=sends)
        under_way.append(_Sent(memory, copies, step))
    units = found[::-1]
    first = units.pop(0) if part.embedding else nothing
    norm, head = (units[part.layers], units[-1]) if part.head else (nothing, nothing)
    finishing = max((_stepping(under_way[at:]) for at in range(len(under_way))), default=0.0)
    return Fillings(first, tuple(units[: part.layers]), norm, head, _bytes(under_way), finishing)


def _filled_alone(run: PlannedRun, part: StageSlice, step_bytes: float) -> Fillings:
    """On one data rank with the units of `fully_shard`, of which all that no block holds is one: the head opens a
    bucket that is done when the stage is. Nothing is sent, but buckets are done in their order."""
    *others, last = _of(run, part)
    master, nothing = float(_master_bytes(run)), Filled()
    open_ = master * last.numel * part.head
    found: list[Filled] = []
    for bucket in others:
        memory = master * bucket.numel
        for at in range(bucket.units):
            found.append(Filled(open_ + memory * (at > 0), memory * (at == 0)))
        found[-1] = replace(found[-1], finishes=open_ + memory + step_bytes * bucket.largest)
    memory = master * last.numel
    for at in range(last.units):
        is_there = part.head or at > 0
        found.append(Filled(memory * is_there, memory * (not is_there)))
    found[-1] = replace(found[-1], finishes=memory + step_bytes * last.largest)
    units = found[::-1]
    first = units.pop(0) if part.embedding or part.head else nothing
    head = Filled(opens=open_)
    return Fillings(first, tuple(units), Filled(waits=open_), head)


class _Sent(NamedTuple):
    """Bytes of a bucket, of what was made to send it, and of what a step with its largest parameter makes."""

    memory: float
    copies: float
    step: float


def _bytes(sent: list[_Sent]) -> float:
    return sum(bucket.memory + bucket.copies for bucket in sent)


def _stepping(sent: list[_Sent]) -> float:
    """While the first has arrived, so that its copies are gone, and is stepped with."""
    return _bytes(sent) - sent[0].copies + sent[0].step


def published_by(run: PlannedRun, part: StageSlice) -> float:
    """Bytes at most while a stage's stepped parameters come back from the other ranks, two buckets at once."""
    if not _is_split(run):
        return 0.0
    sizes = [run.item_bytes * bucket.packed for bucket in _of(run, part)]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], 0.0], strict=True)), default=0.0)


@dataclass(frozen=True)
class _Bucket:
    before: int  # blocks
    numel: int
    packed: int  # numbers as ranks exchange them, uneven rows filled up
    is_even: bool
    units: int
    largest: int  # numbers that are stepped of the largest parameter


def _is_split(run: PlannedRun) -> bool:
    return run.layout.strategy == "SHARD_OPTIMIZER" and run.layout.dp_shard > 1


def _copied(run: PlannedRun, bucket: _Bucket) -> tuple[float, float]:
    """Bytes that are held until a bucket has arrived, and while it is packed: even rows in the gradients' dtype first,
    but not yet the rows that it arrives in."""
    layout, master = run.layout, _master_bytes(run)
    is_other = layout.reduce_bytes != master
    if not _is_split(run):
        held = float(is_other * layout.reduce_bytes * bucket.numel)
        return held, held
    packed = layout.reduce_bytes * bucket.packed
    first = master * bucket.packed * (is_other and bucket.is_even)
    return packed * (1 + 1 / layout.dp_shard), float(packed + first)


def _master_bytes(run: PlannedRun) -> int:
    return 2 if run.precision == "bf16_pure" else 4


def _of(run: PlannedRun, part: StageSlice) -> tuple[_Bucket, ...]:
    layout = run.layout
    least = layout.bucket_bytes // _master_bytes(run)
    stepped = layout.dp_shard if _is_split(run) else 1
    together = layout.strategy not in REPLICATED  # on one data rank `fully_shard`'s units are those of buckets
    return _buckets(run.shape, part, layout.tp, layout.dp_shard, least, stepped, together=together)


@lru_cache(maxsize=1024)
def _buckets(
    shape: ModelShape, part: StageSlice, tp: int, shards: int, least: int, stepped: int, *, together: bool
) -> tuple[_Bucket, ...]:
    """The bucket that is sent first first; of at least so many numbers, but for what is left for the last. `stepped`:
    ranks that the optimizer's states are split over; `together`: what no block holds is one unit."""
    groups: list[list[tuple[int, Unit]]] = []
    held = least
    for before, unit in reversed(_units(shape, part, tp, together=together)):
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
                units=len(group),
                largest=max(table.shard(stepped) // table.times for table in tables),
            )
        )
    return tuple(found)


def _units(shape: ModelShape, part: StageSlice, tp: int, *, together: bool) -> list[tuple[int, Unit]]:
    """What no block holds, the blocks, the norm and the head, each with the blocks before it."""
    first = end_tables(shape, StageSlice(layers=0, embedding=part.embedding, head=together and part.head), tp)
    last = end_tables(shape, part, tp)[len(first) :]
    units: list[tuple[int, Unit]] = [(0, first)] if first else []
    units += [(index, block_tables(shape, tp)) for index in range(part.layers)]
    return units + [(part.layers, (table,)) for table in last]

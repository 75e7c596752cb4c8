"""Formulas of what a strategy costs: the bytes that a rank holds, and the bytes that it sends in a
step. docs/reference/sharding.md has them as tables.

A rank has ceil(R / n) of a parameter's R rows on n ranks, and the last ranks have fewer. Where rows
are stored and sent, every rank's part is filled up to ceil(R / n) rows. Bytes are those of ring
algorithms: an all-gather of x bytes on each of n ranks sends (n - 1) x, a reduce-scatter to x bytes
the same, an all-reduce of x bytes 2 (n - 1) / n x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel3d.config.sharding_strategies import (
    REPLICATED,
    Cadence,
    ShardingName,
    frees_after_forward,
)
from parallel3d.shard_sizes import largest_shard, shard_rows

Shape = tuple[int, ...]
ADAMW_STATES = 2  # numbers for each element


@dataclass(frozen=True, kw_only=True)
class DataLayout:
    """How a model lies over the data ranks, seen from one of them."""

    strategy: ShardingName
    replicate: int = 1
    shard: int = 1
    rank: int = 0  # on dp_shard
    compute_bytes: int = 4
    master_bytes: int = 4
    reduce_bytes: int = 4
    gather: Cadence = "step"
    reduce: Cadence = "step"
    microbatches: int = 1
    # pp > 1: a stage's parameters are then kept even for a single microbatch


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """The bytes on a rank when the optimizer steps."""

    parameters: int  # with master copies
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class SentBytes:
    """The bytes that a rank sends in a step over the data axes, by kind of collective."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0


def held_bytes(shapes: Iterable[Shape], layout: DataLayout) -> HeldBytes:
    """Returns what a rank holds of parameters of these shapes (this tp rank's parts), with the
    states of AdamW."""
    shapes = list(shapes)
    compute = layout.compute_bytes
    master = layout.master_bytes
    whole = sum(math.prod(shape) for shape in shapes)
    rank, ranks = (0, 1) if layout.strategy == "NO_SHARD" else (layout.rank, layout.shard)
    own = sum(math.prod(shape[1:]) * len(shard_rows(shape[0], rank, ranks)) for shape in shapes)
    if layout.strategy in REPLICATED:
        copies = own * master if compute != master else 0
        return HeldBytes(
            parameters=whole * compute + copies,
            gradients=whole * master,
            optimizer=own * master * ADAMW_STATES,
        )
    filled = _filled(shapes, ranks)
    return HeldBytes(
        parameters=filled * master,
        gradients=filled * master,
        optimizer=own * master * ADAMW_STATES,
    )


def sent_bytes(rest: Sequence[Shape], blocks: Sequence[Shape], layout: DataLayout) -> SentBytes:
    """Returns what a rank sends. `blocks` are the shapes of the parameters that are gathered block
    by block, `rest` those of all others."""
    replicate = layout.replicate
    shard = layout.shard
    shapes = [*rest, *blocks]
    if layout.strategy == "NO_SHARD":
        whole = sum(math.prod(shape) for shape in shapes)
        return SentBytes(all_reduce=_all_reduce(whole * layout.reduce_bytes, replicate * shard))
    # How often a step gathers what is not freed after a forward.
    gathers = (
        layout.microbatches
        if layout.gather == "microbatch" and layout.strategy not in REPLICATED
        else 1
    )
    gathered = gathers * _filled(shapes, shard)
    if frees_after_forward(layout.strategy, layout.gather):
        gathered += gathers * _filled(blocks, shard)  # again, for the backward
    reduced = _filled(shapes, shard)
    reductions = layout.microbatches if layout.reduce == "microbatch" else 1
    return SentBytes(
        all_gather=(shard - 1) * gathered * layout.compute_bytes,
        reduce_scatter=(shard - 1) * reduced * reductions * layout.reduce_bytes,
        all_reduce=_all_reduce(reduced * layout.reduce_bytes, replicate),
    )


def _filled(shapes: Iterable[Shape], ranks: int) -> int:
    return sum(math.prod(shape[1:]) * largest_shard(shape[0], ranks) for shape in shapes)


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size

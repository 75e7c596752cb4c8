"""What a strategy costs: bytes that a rank holds, and bytes that it sends in a step. No torch.

n = dp_shard, d = dp_replicate, P parameters of this tp rank's part of a stage; c, m, r bytes of a number computed with,
of a master copy and of a gradient on its way. Of a parameter of R rows a rank has ceil(R / n), the last ones fewer
(`own`); where it is stored and sent it is filled up to ceil(R / n), which summed over the parameters is p: P / n where
n divides all rows.

    held                    parameters              gradients    optimizer (k numbers each)
    NO_SHARD                c P, and m P (*)        m P          k m P
    SHARD_OPTIMIZER         c P, and m own (*)      m P          k m own
    the others, at rest     m p                     m p          k m own
    (*) where c and m differ

The others hold c bytes more of each parameter that is gathered, and until it is reduced m (or c, in one microbatch) of
each gradient: of all, where they are kept for a step, else of a unit or two.

    sent per step           all-gather              reduce-scatter   all-reduce
    NO_SHARD                -                       -                2 (nd - 1) / (nd) r P
    SHARD_OPTIMIZER         (n - 1) c p             (n - 1) r p      2 (d - 1) / d r p
    the others              gathers (n - 1) c p     reductions of it as above, once

`gathers`: one a step; with `gather: microbatch` one for each microbatch; with ZeRO-3 twice as many for what is freed
between its forward and backward (blocks, with `gather: microbatch` or a single microbatch a step). `reductions`: one,
or with `reduce: microbatch` one for each. As ring algorithms send: an all-gather of x bytes on each of n ranks
(n - 1) x, a reduce-scatter to x on each the same, an all-reduce of x 2 (n - 1) / n x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel3d.config.strategy import WHOLE, ZERO_3, Cadence, ShardingName

Shape = tuple[int, ...]


def frees_after_forward(strategy: ShardingName, gather: Cadence, microbatches: int) -> bool:
    """True where a block's gathered parameters go after its forward, and are gathered again for its backward.

    `microbatches` are those of a step; a pipeline, which keeps a stage's parameters even for one, counts at least two.
    """
    return strategy in ZERO_3 and (gather == "microbatch" or microbatches == 1)


def bucket_borders(numels: Sequence[int], least: int) -> list[range]:
    """Returns the neighbouring units of each bucket, in order: counted from the last unit, a bucket is full as soon as
    its units have `least` parameters together."""
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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How a model lies over the data ranks, for one of them."""

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
    is_pipeline: bool = False  # pp > 1: a stage's parameters are then kept even for a single microbatch

    @property
    def frees_forward(self) -> bool:
        microbatches = max(2, self.microbatches) if self.is_pipeline else self.microbatches
        return frees_after_forward(self.strategy, self.gather, microbatches)

    @property
    def gathers(self) -> int:
        """Of what is not freed after a forward."""
        if self.strategy in WHOLE:
            return 1 if self.strategy == "SHARD_OPTIMIZER" else 0
        return self.microbatches if self.gather == "microbatch" else 1


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on a rank, when the optimizer steps."""

    parameters: int  # with master copies
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that a rank sends in a step over the data axes, by kind of collective."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def held_bytes(shapes: Iterable[Shape], costs: Costs, *, states: int = 2) -> Held:
    """Of parameters of these shapes (this tp rank's parts); the optimizer has `states` numbers of each (AdamW 2)."""
    shapes = list(shapes)
    compute, master = costs.compute_bytes, costs.master_bytes
    whole = sum(math.prod(shape) for shape in shapes)
    rank, ranks = (0, 1) if costs.strategy == "NO_SHARD" else (costs.rank, costs.shard)
    own = sum(math.prod(shape[1:]) * own_count(shape[0], rank, ranks) for shape in shapes)
    if costs.strategy in WHOLE:
        copies = own * master if compute != master else 0
        return Held(parameters=whole * compute + copies, gradients=whole * master, optimizer=own * master * states)
    filled = _filled(shapes, ranks)
    return Held(parameters=filled * master, gradients=filled * master, optimizer=own * master * states)


def sent_bytes(rest: Sequence[Shape], blocks: Sequence[Shape], costs: Costs) -> Sent:
    """`blocks`: the shapes of what is gathered block by block, `rest`: of all others."""
    replicate, shard = costs.replicate, costs.shard
    shapes = [*rest, *blocks]
    if costs.strategy == "NO_SHARD":
        whole = sum(math.prod(shape) for shape in shapes)
        return Sent(all_reduce=_all_reduce(whole * costs.reduce_bytes, replicate * shard))
    gathered = costs.gathers * _filled(shapes, shard)
    if costs.frees_forward:
        gathered += costs.gathers * _filled(blocks, shard)  # again, for the backward
    reduced = _filled(shapes, shard)
    reductions = costs.microbatches if costs.reduce == "microbatch" else 1
    return Sent(
        all_gather=(shard - 1) * gathered * costs.compute_bytes,
        reduce_scatter=(shard - 1) * reduced * reductions * costs.reduce_bytes,
        all_reduce=_all_reduce(reduced * costs.reduce_bytes, replicate),
    )


def own_count(rows: int, rank: int, ranks: int) -> int:
    """Of `rows` over `ranks`, those of `rank`."""
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


def _filled(shapes: Iterable[Shape], ranks: int) -> int:
    return sum(math.prod(shape[1:]) * -(-shape[0] // ranks) for shape in shapes)


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size

"""What Muon makes in a step, played as `training.optimizers.muon` does it: of some matrices at a time every rank of a
stage sends its parts to those that become their owners, these make them orthogonal and send all ranks theirs.

The bytes are those of the first rank of the stage: the dearest matrix of each round is its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallel3d.optimizers.assignment import orthogonalize_cost, owners_of, rounds
from parallel3d.planner.model.parameters import Table, block_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.training import MuonCosts
from parallel3d.planner.own.work import Tape


@dataclass(frozen=True)
class Ranks:
    """Of a stage, in the order of the mesh: dp_replicate, dp_shard, tp. `shards`: that split a matrix's rows, dp_shard
    or 1."""

    dp: int
    shards: int
    tp: int

    @property
    def size(self) -> int:
        return self.dp * self.tp


@dataclass(frozen=True)
class Matrix:
    """A weight of a block: the whole, and what the first rank has of it."""

    rows: int
    columns: int
    split: int | None  # the dim that tp splits
    own: int  # numbers

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def parts(self, ranks: Ranks) -> int:
        """Ranks that hold it together."""
        return ranks.shards * (1 if self.split is None else ranks.tp)

    def travels_copied(self) -> bool:
        """Whether a part of what was made of it is no piece of memory: a tall matrix was turned."""
        return self.rows > self.columns or self.split == 1


def hidden_matrices(shape: ModelShape, tp: int) -> tuple[Table, ...]:
    """What Muon steps of a block, on a tp rank."""
    return tuple(table for table in block_tables(shape, tp) if table.columns > 1)


@lru_cache(maxsize=1024)
def muon_step(shape: ModelShape, blocks: int, ranks: Ranks, muon: MuonCosts, *, narrow: bool) -> float:
    """Bytes at the most; `narrow`: parameters of 16 bits."""
    matrices = _matrices(shape, ranks) * blocks
    each = (_round_bytes(some, ranks, muon, narrow=narrow) for some in _rounds(matrices, ranks))
    return max(each, default=0.0)


@lru_cache(maxsize=1024)
def busiest_shapes(shape: ModelShape, blocks: int, ranks: Ranks) -> tuple[tuple[int, int], ...]:
    """The matrices that are made orthogonal one after the other: of each round those of its busiest rank."""
    found: list[tuple[int, int]] = []
    for some in _rounds(_matrices(shape, ranks) * blocks, ranks):
        owned: dict[int, list[tuple[int, int]]] = {}
        for matrix, owner in zip(some, _owners(some, ranks), strict=True):
            owned.setdefault(owner, []).append(matrix.shape)
        found += max(owned.values(), key=lambda shapes: sum(map(orthogonalize_cost, shapes)))
    return tuple(found)


def ranks_of(run: PlannedRun) -> Ranks:
    layout = run.layout
    return Ranks(layout.dp, 1 if layout.strategy == "NO_SHARD" else layout.dp_shard, layout.tp)


def _matrices(shape: ModelShape, ranks: Ranks) -> tuple[Matrix, ...]:
    """Of a block, in the order of its parameters: q, k, v, o, then the MLP's."""
    tp, hidden, found = ranks.tp, shape.hidden, list[Matrix]()
    for at, table in enumerate(hidden_matrices(shape, tp)):
        own = table.shard(ranks.shards) // table.times
        if at in (2, 4):  # row-parallel
            matrix = Matrix(hidden, table.columns * tp, 1 if tp > 1 else None, own)
        else:
            is_whole = tp == 1 or (at == 1 and shape.kv_heads % tp > 0)
            matrix = Matrix(table.rows * (1 if is_whole else tp), hidden, None if is_whole else 0, own)
        found += [matrix] * table.times
    return tuple(found)


def _rounds(matrices: Sequence[Matrix], ranks: Ranks) -> Iterator[list[Matrix]]:
    return rounds(matrices, lambda matrix: matrix.numel / matrix.parts(ranks))


def _owners(matrices: Sequence[Matrix], ranks: Ranks) -> list[int]:
    return owners_of([matrix.shape for matrix in matrices], ranks.size)


def _round_bytes(matrices: Sequence[Matrix], ranks: Ranks, muon: MuonCosts, *, narrow: bool) -> float:
    tape, item = Tape(), muon.item_bytes
    of_parts = 0.0
    for matrix in matrices:
        of_parts += _momentum(tape, matrix, muon, narrow=narrow)
    if ranks.size == 1:
        for matrix in matrices:
            _orthogonalize(tape, matrix, item)
        updates = of_parts
    else:
        updates = item * sum(matrix.own for matrix in matrices)
        owners = _owners(matrices, ranks)
        owned = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == 0]
        sent = item * sum(
            matrix.own for matrix, owner in zip(matrices, owners, strict=True) if _gives(matrix, owner, ranks)
        )
        whole = item * sum(matrix.numel for matrix in owned)
        tape.make(sent, whole)  # what arrives
        tape.drop(sent)
        tape.make(whole)  # put together
        tape.drop(whole, of_parts)
        for matrix in owned:
            _orthogonalize(tape, matrix, item)
        flat = [item * matrix.numel * ranks.size / matrix.parts(ranks) for matrix in owned]
        copied = sum(bytes_ for matrix, bytes_ in zip(owned, flat, strict=True) if matrix.travels_copied())
        tape.make(copied, *flat)
        tape.drop(copied)
        tape.make(updates)
        tape.drop(whole, *flat)
    for matrix in matrices:
        tape.touch((4.0 * (item < 4) + 4.0 * narrow) * matrix.own)
    return tape.peak


def _momentum(tape: Tape, matrix: Matrix, muon: MuonCosts, *, narrow: bool) -> float:
    """Bytes that are left: what is to be made orthogonal of this rank's part."""
    n = matrix.own
    made = 4.0 * n * (muon.nesterov + narrow + (muon.state_bytes < 4))
    tape.make(made)
    if muon.item_bytes == 4:
        left = 4.0 * n * (muon.nesterov or muon.state_bytes < 4)  # the sum itself, or the momentum
        tape.drop(made - left)
        return left
    left = float(muon.item_bytes * n)
    tape.make(left)
    tape.drop(made)
    return left


def _orthogonalize(tape: Tape, matrix: Matrix, item: int) -> None:
    """What it becomes takes its place."""
    whole, gram = item * matrix.numel, item * min(matrix.shape) ** 2
    tape.touch(2 * whole + 2 * gram)


def _gives(matrix: Matrix, owner: int, ranks: Ranks) -> bool:
    """Whether the first rank is, of those that hold the same part, the nearest to the owner."""
    holders = _holders(ranks, whole_over_tp=matrix.split is None)
    at = bisect_left(holders, owner)
    if at == 0:
        return True
    before, after = holders[at - 1], holders[at] if at < len(holders) else None
    return before == 0 and (after is None or owner <= after - owner)


@lru_cache(maxsize=64)
def _holders(ranks: Ranks, *, whole_over_tp: bool) -> tuple[int, ...]:
    """Those that hold what the first rank holds, in order."""
    same = range(ranks.tp if whole_over_tp else 1)
    if ranks.shards == 1:
        return tuple(data * ranks.tp + tp for data in range(ranks.dp) for tp in same)
    replicas = range(0, ranks.size, ranks.shards * ranks.tp)
    return tuple(first + tp for first in replicas for tp in same)

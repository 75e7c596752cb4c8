"""The parameters that a rank of this project's own program holds, tensor by tensor: as `layers/` cuts them over tp (a
vocabulary in uneven parts, keys and values whole where they have fewer heads than tp) and `sharding/` over dp_shard (by
rows, the last ranks having fewer)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.planner.model.shapes import ModelShape, StageSlice


@dataclass(frozen=True)
class Table:
    """A parameter on a tp rank: rows, and numbers in each (1 for a vector). `times`: so many of them."""

    rows: int
    columns: int = 1
    times: int = 1

    @property
    def numel(self) -> int:
        return self.rows * self.columns * self.times

    def shard(self, shards: int, rank: int = 0) -> int:
        """Numbers of it on one of `shards` data ranks: ceil(rows / shards) rows, but for the last ranks."""
        each = -(-self.rows // shards)
        return max(0, min(each, self.rows - rank * each)) * self.columns * self.times


@lru_cache(maxsize=256)
def block_tables(shape: ModelShape, tp: int) -> tuple[Table, ...]:
    """Of one block."""
    h, f, dim = shape.hidden, shape.ffn_hidden, shape.head_dim
    kv = shape.kv_hidden if shape.kv_heads % tp else shape.kv_hidden // tp
    inputs = shape.feed_forward_inputs
    tables = [
        Table(shape.heads * dim // tp, h),
        Table(kv, h, 2),
        Table(h, shape.heads * dim // tp),
        Table(f // tp, h, inputs),
        Table(h, f // tp),
        Table(h, times=4 if shape.layer_norm else 2),
    ]
    if shape.qk_norm:
        tables.append(Table(dim, times=2))
    if shape.biases or shape.qkv_biases:
        tables += [Table(shape.heads * dim // tp), Table(kv, times=2)]
    if shape.biases:
        tables += [Table(h, times=2), Table(f // tp, times=inputs)]
    return tuple(tables)


def vocabulary_rows(shape: ModelShape, tp: int, rank: int = 0) -> int:
    """Rows of the token table on a tp rank: ceil(vocab / tp), the last rank with fewer."""
    each = -(-shape.vocab // tp)
    return max(0, min(each, shape.vocab - rank * each))


def end_tables(shape: ModelShape, part: StageSlice, tp: int, rank: int = 0) -> tuple[Table, ...]:
    """Of a stage's embedding and head, those that it has; a tied table once where they are together."""
    rows, tables = vocabulary_rows(shape, tp, rank), []
    if part.embedding:
        tables.append(Table(rows, shape.hidden))
        if shape.positions == "learned":
            tables.append(Table(shape.position_rows, shape.hidden))
    if part.head:
        tables.append(Table(shape.hidden, times=2 if shape.layer_norm else 1))
        if not (shape.tied_embeddings and part.embedding):
            tables.append(Table(rows, shape.hidden))
    return tuple(tables)


def block_numel(shape: ModelShape, tp: int) -> int:
    """Numbers of one block on a tp rank."""
    return sum(table.numel for table in block_tables(shape, tp))


@lru_cache(maxsize=4096)
def rank_numel(
    shape: ModelShape, parts: tuple[StageSlice, ...], tp: int, *, shards: int = 1, at: tuple[int, int] = (0, 0)
) -> int:
    """Numbers that a rank of these stages holds of `shards` data shards; `at`: its place on tp and dp_shard."""
    tp_rank, shard = at
    blocks = sum(part.layers for part in parts)
    count = blocks * sum(table.shard(shards, shard) for table in block_tables(shape, tp))
    for part in parts:
        count += sum(table.shard(shards, shard) for table in end_tables(shape, part, tp, tp_rank))
    return count

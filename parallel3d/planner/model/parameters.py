"""Parameter counts per tensor, tp rank and data-parallel shard, and FLOPs per token.

If tp does not divide the key-value heads, parallel3d keeps their weights unsharded on each rank.
Megatron-LM repeats each head on tp / kv_heads ranks. The last shard of a vocabulary may be smaller
than the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from parallel3d.config.flops import training_flops_per_token
from parallel3d.planner.model.experts import Experts, LatentAttention
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.shard_sizes import shard_rows

FlopsDefinition = Literal["model", "palm", "megatron_recompute", "blocks_recompute", "causal"]


@dataclass(frozen=True)
class Table:
    """A parameter on a tp rank, as a matrix. A vector has one column. `times` is the number of
    equal parameters.
    """

    rows: int
    columns: int = 1
    times: int = 1

    @property
    def numel(self) -> int:
        return self.shard(1)

    def shard(self, shards: int, rank: int = 0) -> int:
        """Counts the elements on one of `shards` data-parallel ranks, which shard the rows."""
        rows = len(shard_rows(self.rows, rank, shards))
        return rows * self.columns * self.times


@lru_cache(maxsize=256)
def block_tables(
    shape: ModelShape, tp: int, *, repeats_kv_heads: bool = False, dense: bool = False
) -> tuple[Table, ...]:
    """Returns a block's parameters on a tp rank, without routed experts.

    `dense` selects a dense layer of an MoE model. With `repeats_kv_heads`, tp ranks that share a
    key-value head hold copies of it, as in Megatron-LM.
    """
    h = shape.hidden
    of_heads = 1 if shape.saved and not shape.saved.splits_attention else tp
    q = shape.query_hidden // of_heads
    f = shape.ffn_hidden
    kv = shape.kv_hidden
    if shape.kv_heads % of_heads == 0:
        kv = shape.kv_hidden // of_heads
    if repeats_kv_heads:
        kv = max(shape.kv_hidden // tp, shape.head_dim)
    inputs = shape.feed_forward_inputs
    attention = [
        Table(q, h),
        Table(kv, h, 2),
        Table(h, q),
    ]
    feed_forward = [
        Table(f // tp, h, inputs),
        Table(h, f // tp),
    ]
    rest = [Table(h, times=shape.block_norms * shape.norm_vectors)]
    if shape.qk_norm:
        rest.append(Table(shape.head_dim, times=2))
    if shape.qk_norm_whole:
        rest += [Table(q), Table(kv)]
    if shape.biases or shape.qkv_biases:
        rest += [Table(q), Table(kv, times=2)]
    if shape.biases:
        rest += [
            Table(h, times=2),
            Table(f // tp, times=inputs),
        ]
    if shape.latent is not None:
        attention = _latent_tables(shape, shape.latent, tp)
    if shape.experts is not None and not dense:
        feed_forward = _routed_tables(shape, shape.experts, tp)
    return (*attention, *feed_forward, *rest)


def _latent_tables(shape: ModelShape, latent: LatentAttention, tp: int) -> list[Table]:
    """Returns the parameters of latent attention. The projections to low-rank vectors and the norms
    are unsharded."""
    h = shape.hidden
    rank = latent.query_rank
    values = latent.key_value_rank
    queries = [Table(shape.query_hidden // tp, rank or h)]
    if rank is not None:
        queries += [Table(rank, h), Table(rank)]
    return [
        *queries,
        Table(values + latent.turned, h),
        Table(values),
        Table(shape.heads * (latent.plain + latent.value) // tp, values),
        Table(h, shape.heads * latent.value // tp),
    ]


def _routed_tables(shape: ModelShape, experts: Experts, tp: int) -> list[Table]:
    """Returns the router and the shared experts of an MoE layer. The router is unsharded."""
    h = shape.hidden
    shared = experts.shared_hidden // tp
    tables = [Table(experts.count, h)]
    if shared:
        tables += [Table(shared, h, shape.feed_forward_inputs), Table(h, shared)]
    if experts.shared_gate:
        tables.append(Table(1, h))
    if experts.router_bias:
        tables.append(Table(experts.count))
    return tables


@lru_cache(maxsize=256)
def expert_tables(shape: ModelShape, ep: int) -> tuple[Table, ...]:
    """Returns the routed experts of a block on one of `ep` ranks, stacked as in parallel3d or, with
    one row per expert, as in Transformers."""
    experts = shape.experts
    if experts is None:
        return ()
    own = experts.count // ep
    if shape.saved:
        one = shape.hidden * experts.hidden
        wide = Table(own, shape.feed_forward_inputs * one)
        return wide, Table(own, one)
    wide = Table(
        own * experts.hidden,
        shape.hidden,
        shape.feed_forward_inputs,
    )
    down = Table(own * shape.hidden, experts.hidden)
    return wide, down


def expert_numel(
    shape: ModelShape, layers: int, ep: int = 1, shards: int = 1, rank: int = 0
) -> int:
    """Counts the parameters of the routed experts of `layers` blocks on one of an ep rank's
    data-parallel shards."""
    return layers * sum(table.shard(shards, rank) for table in expert_tables(shape, ep))


def hidden_tables(shape: ModelShape, tp: int, *, dense: bool = False) -> tuple[Table, ...]:
    """Returns the matrices of a block on a tp rank, attention first, without routed experts. Muon
    updates them."""
    tables = block_tables(shape, tp, dense=dense)
    return tuple(table for table in tables if min(table.rows, table.columns) > 1)


@lru_cache(maxsize=256)
def weights_of_block(shape: ModelShape, *, dense: bool = False) -> int:
    """Counts the matmul weights that a token uses in a block."""
    weights = sum(table.numel for table in hidden_tables(shape, 1, dense=dense))
    experts = shape.experts
    if experts is None or dense:
        return weights
    routed = expert_numel(shape, 1)
    return weights + routed * experts.per_token // experts.count


def block_weights(shape: ModelShape) -> float:
    """Counts the matmul weights that a token uses in a block, as the mean over all blocks."""
    weights = weights_of_block(shape)
    dense = weights_of_block(shape, dense=True)
    return weights + (dense - weights) * shape.first_dense / shape.layers


def vocabulary_rows(shape: ModelShape, tp: int, rank: int = 0) -> int:
    """Counts the rows of the embedding table on a tp rank."""
    return len(shard_rows(shape.vocab, rank, tp))


def end_tables(shape: ModelShape, part: StageSlice, tp: int, rank: int = 0) -> tuple[Table, ...]:
    """Returns the parameters of a stage outside its blocks. A tied table counts on the first and on
    the last stage, but once if these are the same."""
    rows = vocabulary_rows(shape, tp, rank)
    tables = []
    # Data-parallel ranks shard weight and bias separately.
    norm = Table(shape.hidden, times=shape.norm_vectors)
    if part.embedding:
        tables.append(Table(rows, shape.hidden))
        if shape.positions == "learned":
            tables.append(Table(shape.position_rows, shape.hidden))
        if shape.embedding_norm:
            tables.append(norm)
    if part.head:
        tables.append(norm)
        if not (shape.tied_embeddings and part.embedding):
            tables.append(Table(rows, shape.hidden))
    return tuple(tables)


@lru_cache(maxsize=4096)
def rank_numel(
    shape: ModelShape,
    parts: tuple[StageSlice, ...],
    tp: int,
    *,
    shards: int = 1,
    at: tuple[int, int] = (0, 0),
    repeats_kv_heads: bool = False,
) -> int:
    """Counts the parameters of the stages `parts` on a rank, without routed experts.

    `shards` is the number of data-parallel shards, `at` the rank's indices on tp and
    among the shards.
    """
    tp_rank, dp_rank = at

    def held(tables: Iterable[Table]) -> int:
        return sum(table.shard(shards, dp_rank) for table in tables)

    block = held(block_tables(shape, tp, repeats_kv_heads=repeats_kv_heads))
    dense = held(block_tables(shape, tp, repeats_kv_heads=repeats_kv_heads, dense=True))
    numel = 0
    for part in parts:
        ends = held(end_tables(shape, part, tp, tp_rank))
        numel += ends + (part.layers - part.dense) * block + part.dense * dense
    return numel


def whole_model(shape: ModelShape) -> StageSlice:
    """Returns the full model as one stage."""
    return StageSlice(
        layers=shape.layers,
        embedding=True,
        head=True,
        dense=shape.first_dense,
    )


def total_parameters(shape: ModelShape) -> int:
    """Counts the parameters of the full model. A tied table counts once."""
    whole = whole_model(shape)
    return rank_numel(shape, (whole,), 1) + expert_numel(shape, whole.layers - whole.dense)


def active_parameters(shape: ModelShape) -> int:
    """Counts the parameters that a token uses: all except the experts not selected for it."""
    experts = shape.experts
    if experts is None:
        return total_parameters(shape)
    routed = expert_numel(shape, shape.layers - shape.first_dense)
    return total_parameters(shape) - routed + routed * experts.per_token // experts.count


def model_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Returns the FLOPs per token for the MFU of plans and trainer metrics."""
    return training_flops_per_token(
        layers=shape.layers,
        hidden=shape.hidden,
        query_hidden=shape.attention_hidden,
        weights_per_block=block_weights(shape),
        vocab=shape.vocab,
        seq_len=shape.attended(seq_len),
    )


def reported_flops_per_token(shape: ModelShape, seq_len: int, definition: FlopsDefinition) -> float:
    """Returns the FLOPs per token by the definition that a published run uses."""
    attention = 12 * shape.layers * shape.attention_hidden * shape.attended(seq_len)
    blocks = shape.layers * block_weights(shape)
    head = shape.vocab * shape.hidden
    return {
        "model": model_flops_per_token(shape, seq_len),
        # All active parameters, including embeddings.
        "palm": 6 * active_parameters(shape) + attention,
        # Narayanan et al. 2021 (SC21), equation 3: the forward pass of the blocks runs twice.
        "megatron_recompute": 8 * blocks + 6 * head + attention * 4 / 3,
        "blocks_recompute": 8 * blocks,
        "causal": 6 * (blocks + head) + attention / 2,
    }[definition]

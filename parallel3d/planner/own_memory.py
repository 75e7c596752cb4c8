"""The memory of this project's own engine: what its runtime, its layers and its sharding hold at once, found by going
through the moments of a step at which a rank may hold most. `parallel3d-plan verify` compares it with a dry run of the
real thing (docs/verify.md).

A rank's step: parameters are gathered, forwards fill up activations, the first backward begins with most of them alive
(`first`); once every stage has had a backward there are whole gradients beside them (`steady`); the last backward
reduces block after block (`last`), and the optimizer has shards alone (`step`).

Per rank: P parameters, e bytes of an activation, m = 4 bytes of a master weight, s = dp_shard:

                          one data rank, fp32    NO_SHARD, SHARD_OPTIMIZER     sharded at rest (fully_shard)
    parameters            m P                    e P, and where e < m m P / s  m P / s
    gradients             m P, from the first    m P throughout                m P whole, from the first backward to the
                          backward on                                          last (reduce = step), then m P / s
    optimizer             2 m P                  2 m P / s                     2 m P / s
    gathered              -                      -                             e P from the first forward to the last
                                                                               backward (gather = step)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from parallel3d.layers.activations import BlockActivations, BlockRecompute
from parallel3d.pipeline.schedule import Kind
from parallel3d.planner.activations import live_microbatches, split_states
from parallel3d.planner.job import Job
from parallel3d.planner.own_buckets import published_by, sent_by
from parallel3d.planner.parameters import Table, block_tables, end_tables, vocabulary_rows
from parallel3d.planner.shapes import StageSlice
from parallel3d.sharding.strategy import WHOLE, ZERO_3

_SPLITS = ("zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
_CHUNK_BYTES = 2**29  # float32 logits of a chunk, and from twice as many on they come in chunks (training.loss)
_POSTED = 3  # receives from each rank that are open at once (pipeline.transport.AHEAD, and the one waited for)
_UNDER_WAY = 4  # sends to each rank that are kept until they are done (pipeline.transport.IN_FLIGHT)

# What a backward does with the weights' gradients: new ones, added to those there are, or left for its second half.
Weights = Literal["new", "added", "later"]
Moment = Literal["forward", "first backward", "backward", "last backward", "optimizer's step"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes held at one moment of a step, by kind."""

    moment: Moment
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    temporary: float

    @property
    def total(self) -> float:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.temporary


def most_held(job: Job, rank: int) -> Held:
    """At the moment of a step when a pipeline rank holds most."""
    return max(_Rank(job, rank).moments(), key=lambda held: held.total)


def least_held(job: Job, rank: int) -> tuple[float, float, float]:
    """Bytes that a rank has at least when its first backward begins: at rest, in gathered parameters, and in
    activations with logits. The first two are alike whatever is recomputed and however large a microbatch is."""
    held = _Rank(job, rank)
    activations = (held._kept_of_all + held._logits_of_all) * held.live / len(held.stages)
    # How many forwards are alive where backwards are split is for the schedule to say.
    return sum(held._at_rest), held._gathered, 0.0 if held.splits else activations


@lru_cache(maxsize=4096)
def _neighbours(placement: tuple[int, ...], rank: int) -> tuple[bool, bool]:
    pairs = list(zip(placement[:-1], placement[1:], strict=True))
    return any(b == rank != a for a, b in pairs), any(a == rank != b for a, b in pairs)


@lru_cache(maxsize=4096)
def _bytes_of(block: BlockActivations, recompute: BlockRecompute) -> int:
    return block.bytes(recompute)


@dataclass(frozen=True)
class _Stage:
    """One stage of a rank: its slice, and the index of its first block in the whole model."""

    part: StageSlice
    first: int
    blocks: int  # parameters
    ends: int  # parameters


class _Rank:
    """What one pipeline rank has, and holds when."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        layout = job.layout
        self.item = int(job.item_bytes)
        self.master = 2 if job.precision == "bf16_pure" else 4
        self.tokens = job.tokens
        self.outside = job.tokens // (layout.tp if layout.sequence_parallel else 1)
        self.block_tables = block_tables(job.shape, layout.tp)
        self.block_numel = sum(table.numel for table in self.block_tables)
        self.alone = layout.dp == 1 and self.item == self.master
        self.whole = not self.alone and (layout.dp == 1 or layout.strategy in WHOLE)
        self.sharded = not self.alone and not self.whole
        shards = layout.dp_shard if layout.strategy != "NO_SHARD" else 1
        self.shards = 1 if self.alone else shards
        starts = accumulate((part.layers for part in job.stages), initial=0)
        self.stages = [
            _Stage(part, first, part.layers * self.block_numel, sum(t.numel for t in self._ends(part)))
            for part, first, holder in zip(job.stages, starts, job.placement, strict=False)
            if holder == rank
        ]
        self.splits = layout.schedule in _SPLITS
        self.live = live_microbatches(
            layout.schedule,
            pp=layout.pp,
            rank=rank,
            microbatches=layout.microbatches,
            virtual_stages=layout.virtual_stages,
        )
        self.forwards = layout.microbatches * len(self.stages)
        self.parameters = sum(stage.blocks + stage.ends for stage in self.stages)
        blocks = sum(stage.part.layers for stage in self.stages)
        # Gathered by ranks' parts of one size.
        self.block_gathered = sum(table.shard(self.shards) for table in self.block_tables) * self.shards
        self.shard = blocks * sum(table.shard(self.shards) for table in self.block_tables)
        self.shard += sum(t.shard(self.shards) for stage in self.stages for t in self._ends(stage.part))

    def moments(self) -> list[Held]:
        different = {(stage.part, stage.first % self.job.layout.recompute_every): stage for stage in self.stages}
        return [self._step(), *(held for stage in different.values() for held in self._moments_of(stage))]

    @cached_property
    def _kept_of_all(self) -> float:
        return sum(map(self._kept, self.stages))

    @cached_property
    def _logits_of_all(self) -> float:
        return sum(map(self._logits, self.stages))

    def _moments_of(self, stage: _Stage) -> Iterator[Held]:
        """When a stage's backward may be the fullest."""
        live = self.live
        whole = self._whole_gradients
        up_to_here = (self.stages.index(stage) + 1) * self.job.layout.microbatches
        if self._goes_round_once:
            live = min(live, up_to_here)
        if stage.part.layers:
            yield self._forward(stage)
        if self.splits:
            yield from self._split_moments(stage)
        elif self._goes_round_once:
            # One stage after the other, the last first: gradients of one alone are whole, the later ones' are reduced.
            share = whole * (stage.blocks + stage.ends) / max(self.parameters, 1)
            yield self._backward("backward", stage, max(min(live, up_to_here - 1), 1), ends=False, gradients=share)
        elif self.forwards > live:
            for ends in (False, True):
                yield self._backward("backward", stage, live, ends=ends, gradients=whole)
        elif live > 1:
            yield self._backward("backward", stage, live - 1, ends=False, gradients=whole)
        if not self.splits:
            yield self._backward("first backward", stage, live, ends=False, gradients=0.0, weights="new")
            so_far = self._gradients_but(stage)
            yield self._backward("first backward", stage, live, ends=True, gradients=so_far, weights="new")
        yield from self._last(stage)

    @property
    def _goes_round_once(self) -> bool:
        """Whether a stage has all its backwards before the one before it has any."""
        layout = self.job.layout
        is_one = layout.schedule == "looped_bfs" or layout.microbatches <= layout.pp
        return len(self.stages) > 1 and not self.splits and is_one

    def _split_moments(self, stage: _Stage) -> Iterator[Held]:
        """Where backwards are split: as their halves begin, the schedule having so many forwards alive and so many
        second halves put off."""
        at = self.stages.index(stage)
        for state in split_states(self.job.layout)[self.rank]:
            if state.stage != at:
                continue
            gradients = 0.0 if state.is_first else self._whole_gradients
            made: Weights = "later" if state.kind is Kind.INPUT else "new" if state.is_first else "added"
            alive = sum(state.alive)
            held = self._backward("backward", stage, alive, ends=False, gradients=gradients, weights=made)
            waiting = sum(n * self._put_off(each) for n, each in zip(state.put_off, self.stages, strict=True))
            kept = sum(n * self._kept(each) for n, each in zip(state.alive, self.stages, strict=True))
            logits = sum(n * self._logits(each) for n, each in zip(state.alive, self.stages, strict=True))
            held = replace(held, activations=kept + waiting, logits=logits)
            if state.kind is Kind.WEIGHT:
                yield replace(held, temporary=self._weights_work(stage, made))
                continue
            yield held
            if state.kind is Kind.INPUT and stage.part.layers:  # as it ends
                now_put_off = self._put_off(stage) - self._kept(stage)
                yield replace(
                    held,
                    activations=held.activations + now_put_off,
                    logits=logits - self._logits(stage),
                    temporary=self._boundary + self._embedding_work(stage),
                )

    def _weights_work(self, stage: _Stage, made: Weights) -> float:
        """The gradients that a second half makes: added one by one to whole ones, or waiting for all of the stage."""
        shape, layout = self.job.shape, self.job.layout
        numel = stage.blocks + self._head(stage)
        if self.whole:
            numel = max(shape.hidden * shape.ffn_hidden // layout.tp, self._head(stage))
        return float(self.item * numel * self._makes(made))

    def _put_off(self, stage: _Stage) -> float:
        """What waits for the second half of a backward: each product's input and its output's gradient."""
        e, shape, layout = self.item, self.job.shape, self.job.layout
        inner = e * self.tokens * shape.ffn_hidden // layout.tp
        whole = e * self.tokens * shape.hidden
        heads = e * self.tokens * shape.hidden // layout.tp
        keys = e * self.tokens * max(shape.kv_heads // layout.tp, 1) * shape.head_dim
        block = (shape.feed_forward_inputs + 1) * inner + 4 * whole + 2 * heads + 2 * keys
        head = whole + self._logits(stage) if stage.part.head else 0.0
        return float(stage.part.layers * block + head)

    # What is there throughout.

    @property
    def _at_rest(self) -> tuple[float, float, float]:
        """Parameters, gradients and optimizer states."""
        shard = self.shard
        if self.alone:
            return self.master * self.parameters, 0.0, self.job.state_bytes * self.parameters
        if self.whole:
            masters = self.master * shard if self.item < self.master else 0
            return self.item * self.parameters + masters, self.master * self.parameters, self.job.state_bytes * shard
        return self.master * shard, 0.0, self.job.state_bytes * shard

    @property
    def _gathered(self) -> float:
        """While forwards and backwards take turns."""
        if not self.sharded:
            return 0.0
        if self._frees_forward:  # a block in use, and the one that is gathered ahead
            return self.item * (self._ends_of_all + min(2, self._blocks_of_all) * self.block_gathered)
        return self.item * (self._ends_of_all + self._blocks_of_all * self.block_gathered)

    @property
    def _ends_of_all(self) -> int:
        return sum(t.shard(self.shards) * self.shards for stage in self.stages for t in self._ends(stage.part))

    @property
    def _blocks_of_all(self) -> int:
        return sum(stage.part.layers for stage in self.stages)

    def _gathered_at(self, stage: _Stage, *, ends: bool) -> float:
        """In a backward of a stage, `ends`: at its first block."""
        if not self.sharded or self._frees_forward:
            return self._gathered
        if self.job.layout.gather == "microbatch" and ends:
            return self._gathered - self.item * max(stage.part.layers - 2, 0) * self.block_gathered
        if not self._goes_round_once:
            return self._gathered
        # Where stages go one after the other, those that are done have freed theirs.
        return self.item * sum(map(self._gathered_of, self.stages[: self.stages.index(stage) + 1]))

    def _gathered_of(self, stage: _Stage) -> int:
        ends = sum(table.shard(self.shards) for table in self._ends(stage.part)) * self.shards
        return ends + stage.part.layers * self.block_gathered

    @property
    def _frees_forward(self) -> bool:
        """Whether a block's gathered parameters go after its forward, too (`sharding.apply.shard`)."""
        layout = self.job.layout
        is_one = layout.pp == 1 and layout.microbatches == 1
        return layout.strategy in ZERO_3 and (layout.gather == "microbatch" or is_one)

    @property
    def _whole_gradients(self) -> float:
        """Once every stage has had a backward that is not its last."""
        if self.sharded and self.job.layout.microbatches == 1:
            return 0.0
        if self.alone or (self.sharded and self.job.layout.reduce == "step"):
            return self.master * self.parameters
        return self.master * self.shard if self.sharded else 0.0  # of `whole` they are there throughout

    def _forward(self, stage: _Stage) -> Held:
        """The last block of a stage's forward; of the first one, while its parameters are being gathered."""
        is_first = self.live <= len(self.stages)
        gathering = self.item * self.block_numel if self.sharded and is_first else 0
        kept = self._kept_of_all * self.live / len(self.stages)
        whole = float(self.item * self.tokens * self.job.shape.hidden)
        return self._held(
            "forward",
            gradients=0.0 if self.forwards <= self.live else self._whole_gradients,
            activations=kept,
            logits=self._logits_of_all * (self.live / len(self.stages) - 1),
            buffers=self._gathered + gathering + self._transport(live=self.live, gradients=not is_first),
            temporary=whole * (1 + self._rearranges) + self._boundary,
        )

    @property
    def _rearranges(self) -> int:
        """Whether what is gathered or scattered along the sequence is copied into its order: not of one sequence."""
        return 1 if self._gathers_sequence and self.job.layout.microbatch_size > 1 else 0

    def _gradients_but(self, stage: _Stage) -> float:
        """When a first backward has come to its first block, and nothing else has had one; but for the head's."""
        return self._whole_gradients * max(stage.blocks - self.block_numel, 0) / max(self.parameters, 1)

    @cached_property
    def _boundary(self) -> float:
        """One activation between stages."""
        return self.item * self.outside * self.job.shape.hidden

    @cached_property
    def _neighbours(self) -> tuple[bool, bool]:
        """Whether another rank has a stage before one of this rank's, and after one."""
        return _neighbours(self.job.placement, self.rank)

    def _transport(self, *, live: float, gradients: bool) -> float:
        """Receives that are open and sends that may not be done, beside the activations that backwards wait for.
        `gradients`: some have been sent."""
        chunks = len(self.stages)
        before, after = self._neighbours
        count = self.forwards
        held = 0.0
        if before:
            held += min(_POSTED, max(0.0, count - live)) + (min(_UNDER_WAY, count - (live > 0)) if gradients else 0)
        if after:
            held += min(_UNDER_WAY, count if gradients else live) + min(_POSTED, count - 1) + 1
        if before and after and self.job.layout.pp == 2 and chunks > 1:  # one peer: one queue each way
            held -= _POSTED + _UNDER_WAY
        return self._boundary * max(held, 0.0)

    # Activations.

    @cached_property
    def _block(self) -> BlockActivations:
        shape, layout = self.job.shape, self.job.layout
        return BlockActivations(
            batch=layout.microbatch_size,
            seq=self.job.seq_len,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn_hidden=shape.ffn_hidden,
            item_bytes=self.item,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            fused_norm=not self.job.on_cpu,
            layer_norm=shape.layer_norm,
            gated=shape.feed_forward_inputs == 2,
        )

    @property
    def _recompute(self) -> BlockRecompute:
        kind = self.job.layout.recompute
        return "full" if kind == "layer" or kind == "op" else kind

    def _kept(self, stage: _Stage) -> float:
        """Bytes of a stage and a microbatch, between its forward and its backward, but for logits."""
        part, shape = stage.part, self.job.shape
        every = self.job.layout.recompute_every
        again = -(-(stage.first + part.layers) // every) - -(-stage.first // every)  # blocks that are recomputed
        kept = again * self._one_block + (part.layers - again) * self._plain_block
        if part.embedding and self.job.layout.tp > 1:
            kept += 9 * self.tokens  # ids as rows of this rank, and which are another's
        if part.head:
            kept += self.outside * (2 * shape.hidden * self.item + 4) + 4 * self.tokens
            if self._chunk is not None and self._gathers_sequence:
                kept += self.tokens * shape.hidden * self.item  # the head's input, gathered once
        return kept

    def _logits(self, stage: _Stage) -> float:
        """Of a microbatch, between the head's forward and its backward."""
        whole = stage.part.head and self._chunk is None
        return float(self.item * self.tokens * self._vocab) if whole else 0.0

    @cached_property
    def _chunk(self) -> int | None:
        """Tokens whose logits exist at a time (`training.loss.chunk_tokens`); None: all of a microbatch."""
        wanted = self.job.loss_chunk_tokens
        if wanted is None:
            is_large = 4 * self.tokens * self._table_rows >= 2 * _CHUNK_BYTES
            wanted = max(1, _CHUNK_BYTES // (4 * self._table_rows)) if is_large else self.tokens
        return None if wanted >= self.tokens else wanted

    @property
    def _table_rows(self) -> int:
        return -(-self.job.shape.vocab // self.job.layout.tp)

    @property
    def _vocab(self) -> int:
        return vocabulary_rows(self.job.shape, self.job.layout.tp)

    # At work: what a backward of a stage makes for itself, less what it has freed of what its forward kept.

    def _work_at_start(self, stage: _Stage, weights: Weights) -> float:
        """While all of the stage's blocks wait: the loss, the head, or the last block."""
        found = [0.0]
        after = 0.0  # what the head leaves to the blocks
        if stage.part.head:
            e, hidden, vocab = self.item, self.job.shape.hidden, self._vocab
            if self._chunk is None:
                block = self._frees_forward * self.item * self.block_gathered
                blocks = min(2, self._blocks_of_all)  # in self._gathered; the loss has none, the head one on its way
                found.append(4.0 * self.tokens * vocab - blocks * block)  # softmax in float32
                product = self._into_columns + e * hidden * vocab * self._makes(weights)
                found.append(product - max(blocks - 1, 0) * block)
            else:
                found.append(self._chunked_work)
            after = self._heads_gradient(stage, weights) - self._logits(stage)
        if stage.part.layers:
            found.append(after + self._block_work(stage.first + stage.part.layers - 1, weights))
        return max(found)

    def _heads_gradient(self, stage: _Stage, weights: Weights) -> float:
        """Bytes of the head's, which waits beside the total until its stage is done, or is the total."""
        return float(self.item * self._head(stage)) if not self.whole and self._makes(weights) else 0.0

    def _head(self, stage: _Stage) -> int:
        """Numbers of a stage's output table."""
        return self.job.shape.hidden * self._vocab if stage.part.head else 0

    def _makes(self, weights: Weights) -> bool:
        """Whether a product makes a gradient of its own: the first, or one that is added to a wider total."""
        if weights == "later":
            return False
        return self.item < self.master or (weights == "new" and not self.whole)

    @property
    def _chunked_work(self) -> float:
        """Head and loss a chunk at a time: logits, their softmax, their gradient; the input's gradient, and the
        table's, which is added up in float32 where nothing as wide is there already."""
        e, table, narrow = self.item, self.job.shape.hidden * self._vocab, self.item < 4
        logits = (self._chunk or 0) * self._vocab
        chunk = max(logits * (4 + 2 * e * narrow), 2 * e * logits + e * table if narrow else 0)
        added_up = 4 * table if self.sharded and (narrow or not self._whole_gradients) else 0
        return float(chunk + e * self.tokens * self.job.shape.hidden + added_up)

    def _work_at_end(self, stage: _Stage, weights: Weights) -> float:
        """With the activations of the first block alone."""
        gradients = self._heads_gradient(stage, weights)
        found = [self._block_work(stage.first, weights) + gradients if stage.part.layers else 0.0]
        if stage.part.embedding:
            found.append(gradients + self._boundary + self._embedding_work(stage) - self._of_block(stage.first))
        return max(found)

    def _embedding_work(self, stage: _Stage) -> float:
        """Beside the gradient that comes to it: that gathered, that of its own rows, and the table's."""
        if not stage.part.embedding:
            return 0.0
        e, hidden = self.item, self.job.shape.hidden
        numbers = self.tokens * hidden
        table = e * hidden * self._vocab if self.sharded else 4 * numbers * (e < self.master or self.alone)
        return float(e * numbers * ((self.job.layout.tp > 1) + self._gathers_sequence) + table)

    def _is_recomputed(self, index: int) -> bool:
        return index % self.job.layout.recompute_every == 0

    def _of_block(self, index: int) -> float:
        return self._one_block if self._is_recomputed(index) else self._plain_block

    @cached_property
    def _one_block(self) -> float:
        return float(_bytes_of(self._block, self._recompute))

    @cached_property
    def _plain_block(self) -> float:
        return float(_bytes_of(self._block, "none"))

    @property
    def _gathers_sequence(self) -> bool:
        return self.job.layout.sequence_parallel and self.job.layout.tp > 1

    @cached_property
    def _into_columns(self) -> float:
        """The input of a column-parallel layer gathered again, its gradient, and that summed over tp."""
        whole = self.item * self.tokens * self.job.shape.hidden
        return (2.0 + self._rearranges) * whole + self._boundary if self._gathers_sequence else 1.0 * whole

    def _block_work(self, index: int, weights: Weights) -> float:
        """Of the MLP, which comes first in a block's backward, with the whole block's activations there."""
        e, shape, tp = self.item, self.job.shape, self.job.layout.tp
        inner = float(e * self.tokens * shape.ffn_hidden // tp)
        whole = float(e * self.tokens * shape.hidden) if self._gathers_sequence else 0.0
        weight = float(e * shape.hidden * shape.ffn_hidden // tp * self._makes(weights))
        kept = 0.0 if self.whole else weight  # until the block is done, where its gradients are new in each backward
        arriving = self._boundary
        recomputed = self._plain_block - self._of_block(index) if self._recompute == "full" else 0.0
        down = whole + inner + weight
        if shape.feed_forward_inputs == 2:
            product = kept + 2 * inner  # gradients of both factors and of their product, which itself is gone
            columns = kept + 2 * max(weight, kept) - 2 * inner + self._into_columns
        else:
            product = kept + 2 * inner - inner
            columns = kept + weight - inner + self._into_columns
        return recomputed + arriving + max(down, product, columns)

    # Moments.

    def _held(
        self, moment: Moment, *, gradients: float, activations: float, logits: float, buffers: float, temporary: float
    ) -> Held:
        parameters, at_rest, optimizer = self._at_rest
        return Held(
            moment=moment,
            parameters=parameters,
            gradients=at_rest + gradients,
            optimizer=optimizer,
            activations=activations,
            logits=logits,
            buffers=buffers,
            temporary=temporary,
        )

    def _alive(self, live: float) -> tuple[float, float]:
        """Activations and logits of so many microbatches, each of one of the rank's stages: where stages go one after
        the other, of the first ones."""
        share = live / len(self.stages)
        if not self._goes_round_once:
            return self._kept_of_all * share, self._logits_of_all * share
        kept = logits = 0.0
        for stage in self.stages:
            here = min(live, self.job.layout.microbatches)
            kept, logits, live = kept + here * self._kept(stage), logits + here * self._logits(stage), live - here
        return kept, logits

    def _backward(
        self,
        moment: Moment,
        stage: _Stage,
        live: float,
        *,
        ends: bool,
        gradients: float,
        weights: Weights = "added",
    ) -> Held:
        """`live` microbatches of one of the rank's stages each, with whole `gradients` beside them. `ends`: the one
        that is differentiated has but one block left."""
        kept, logits = self._alive(live)
        if ends:
            kept -= self._kept(stage) - (self._of_block(stage.first) if stage.part.layers else 0.0)
            logits -= self._logits(stage)
        return self._held(
            moment,
            gradients=gradients,
            activations=kept,
            logits=logits,
            buffers=self._gathered_at(stage, ends=ends)
            + self._transport(live=live, gradients=moment != "first backward"),
            temporary=self._work_at_end(stage, weights) if ends else self._work_at_start(stage, weights),
        )

    def _last(self, stage: _Stage) -> Iterator[Held]:
        """The last backward: gradients on their way to the other data ranks."""
        if not self.sharded:
            yield from self._sends_whole(stage)
            return
        if self._goes_round_once:
            return
        layers, whole = stage.part.layers, self._whole_gradients
        freed = self.item * self.block_gathered if layers else 0.0  # of what is reduced
        buffers = self._gathered - freed + self._transport(live=0, gradients=True)
        sent = self._scattered(self.block_numel if layers else stage.ends)
        kept = self._kept(stage) - self._one_block if layers else 0.0
        weights: Weights = "added" if whole else "new"
        at_work = 0.0
        if layers > 1 and not whole:
            at_work = self._block_work(stage.first + layers - 2, weights) + self._heads_gradient(stage, weights)
        yield self._held(
            "last backward", gradients=whole, activations=kept, logits=0.0, buffers=buffers, temporary=sent + at_work
        )
        width = self.master if whole else self.item
        others = (
            self._gathered
            - self.item * stage.part.layers * self.block_gathered
            + self._transport(live=0, gradients=True)
        )
        yield self._held(
            "last backward",
            gradients=whole * (1 - stage.blocks / self.parameters) if whole else width * stage.ends,
            activations=0.0,
            logits=0.0,
            buffers=max(others, 0.0),
            temporary=self._scattered(stage.ends) + self.master * stage.blocks / self.shards,
        )

    def _scattered(self, numel: int) -> float:
        """Bytes made to reduce one unit's gradients: what is sent, and what comes back."""
        return self.job.layout.reduce_bytes * numel * (1 + 1 / self.shards)

    def _sends_whole(self, stage: _Stage) -> Iterator[Held]:
        """Buckets of whole gradients, those of the stages after this one still being on their way."""
        if self.alone or self.job.layout.dp == 1:
            return
        done = sum(sent_by(self.job, each.part)[-1].bytes for each in self.stages[self.stages.index(stage) + 1 :])
        others = self.stages[: self.stages.index(stage)] if self._goes_round_once else []
        kept = self.job.layout.microbatches * sum(map(self._kept, others))
        for sent in sent_by(self.job, stage.part):
            blocks = range(stage.first, stage.first + sent.before)
            at_work = self._block_work(blocks[-1], "added") if blocks and not self.splits else 0.0
            yield self._held(
                "last backward",
                gradients=self._whole_gradients,
                activations=0.0 if self.splits else kept + sum(map(self._of_block, blocks)),
                logits=0.0,
                buffers=self._transport(live=0, gradients=True),
                temporary=sent.bytes + done + at_work,
            )

    def _step(self) -> Held:
        gradients = self.master * self.shard if self.sharded else self._whole_gradients
        published = max(published_by(self.job, stage.part) for stage in self.stages) if self.whole else 0.0
        return self._held(
            "optimizer's step",
            gradients=gradients,
            activations=0.0,
            logits=0.0,
            buffers=self._transport(live=0, gradients=True),
            temporary=published,
        )

    def _ends(self, part: StageSlice) -> tuple[Table, ...]:
        return end_tables(self.job.shape, part, self.job.layout.tp) if part.embedding or part.head else ()

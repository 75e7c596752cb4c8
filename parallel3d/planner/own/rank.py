"""What one pipeline rank of this project's own program has: its stages, the bytes of each in every state that the data
dimension knows (`sharding/`), and of a microbatch.

Per rank: P parameters, p of them where rows are filled up to what dp_shard divides, e bytes of an activation, m of a
master weight, r of a gradient on its way, s = dp_shard, k bytes of the optimizer's states for each parameter:

                          one data rank, e = m    NO_SHARD, SHARD_OPTIMIZER     sharded at rest (fully_shard)
    parameters            m P                     e P, and where e < m m P / s  m p / s
    gradients             m P, from a stage's     m P throughout                r P whole, from a stage's first backward
                          first backward on                                     to its last (reduce = step); m p / s
                                                                                after it, or throughout
    optimizer             k P                     k P / s                       k p / s
    gathered              -                       -                             e p from a stage's first forward to its
                                                                                last backward (gather = step)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from parallel3d.config.strategy import REPLICATED
from parallel3d.layers.activations import BlockActivations, BlockRecompute
from parallel3d.planner.model.parameters import Table, block_tables, end_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.own.ends import EndSizes
from parallel3d.planner.own.muon import hidden_matrices, muon_step, ranks_of
from parallel3d.planner.own.states import Walk
from parallel3d.planner.own.step import adafactor_states, adafactor_step, rounded_step
from parallel3d.planner.own.work import BlockSizes, Weights, put_off_bytes
from parallel3d.schedules.registry import schedule_traits
from parallel3d.sharding.bytes import frees_after_forward


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: their number, and where rows are filled up to what the shards
    divide; `shard` on one of them; `last` of the last parameter."""

    numel: int
    padded: int
    shard: int
    last: int

    @classmethod
    def of(cls, tables: tuple[Table, ...], shards: int, last: int) -> Unit:
        shard = sum(table.shard(shards) for table in tables)
        return cls(sum(table.numel for table in tables), shard * shards, shard, last)


@dataclass(frozen=True)
class Stage:
    """A stage of the rank, `first` being its first block's index in the whole model, but for multiples of
    recompute_every: stages that hold as much are one. Bytes are of one microbatch."""

    part: StageSlice
    first: int
    ends: Unit  # what no block holds
    kept: float  # between forward and backward, but for logits
    logits: float
    put_off: float  # between the two halves of a backward

    @property
    def blocks(self) -> int:
        return self.part.layers


class Rank:
    def __init__(self, run: PlannedRun, rank: int) -> None:
        layout = run.layout
        self.run, self.rank, self.layout = run, rank, layout
        self.item = int(run.item_bytes)
        self.master = 2 if run.precision == "bf16_pure" else 4
        self.alone = layout.dp == 1 and self.item == self.master
        self.whole = not self.alone and (layout.dp == 1 or layout.strategy in REPLICATED)
        self.sharded = not self.alone and not self.whole
        self.shards = 1 if self.alone or layout.strategy == "NO_SHARD" else layout.dp_shard
        self.block = _unit(run.shape, None, layout.tp, self.shards)
        norm_bytes, self.sizes = _block_sizes(run)
        self.ends = EndSizes.of(run, norm_bytes=norm_bytes)
        self.stages = self._stages(run.stages_of(rank))

    @cached_property
    def kinds(self) -> list[Stage]:
        """One stage of each kind."""
        return list(dict.fromkeys(self.stages))

    @cached_property
    def walk(self) -> Walk:
        layout = self.layout
        kinds = {kind: at for at, kind in enumerate(self.kinds)}
        return Walk(
            schedule=layout.schedule,
            pp=layout.pp,
            rank=self.rank,
            microbatches=layout.microbatches,
            virtual_stages=layout.virtual_stages,
            alike=tuple(kinds[stage] for stage in self.stages),
            frees_each=self.sharded and layout.gather == "microbatch",
            keeps_gradients=not self.sizes.gathers and not self.sizes.mask,
        )

    @cached_property
    def numel(self) -> int:
        return sum(stage.blocks * self.block.numel + stage.ends.numel for stage in self.stages)

    @cached_property
    def shard(self) -> int:
        return sum(stage.blocks * self.block.shard + stage.ends.shard for stage in self.stages)

    @cached_property
    def at_rest(self) -> tuple[float, float, float]:
        """Parameters, gradients and optimizer states that are there throughout."""
        numel = self.numel if self.alone else self.shard
        states = self.run.state_bytes * numel
        if self.run.factors:
            states = adafactor_states(self.tables, self.shards)
        if self.run.muon is not None:
            saved = self.run.state_bytes - self.run.muon.state_bytes
            states -= saved * self._blocks * self._hidden_matrices
        if self.alone:
            return self.master * self.numel, 0.0, states
        if self.whole:
            masters = self.master * self.shard if self.item < self.master else 0
            gradients = 0.0 if self.run.steps_in_backward else self.master * self.numel
            return self.item * self.numel + masters, gradients, states
        return self.master * self.shard, 0.0, states

    # Gradients.

    @cached_property
    def sum_bytes(self) -> int:
        """Of a number of a whole gradient that waits to be reduced."""
        return self.layout.reduce_bytes if self.sharded else self.master

    @cached_property
    def steps_alone(self) -> bool:
        """Whether a parameter is stepped in the backward with no others of a block: not of `fully_shard`."""
        return self.run.steps_in_backward and not self.sharded

    @cached_property
    def reduces_each(self) -> bool:
        return self.sharded and self.layout.reduce == "microbatch"

    def whole_gradients(self, stage: Stage) -> float:
        """Once the stage has had a backward that is not its last; of `whole` they are there throughout."""
        numel = stage.blocks * self.block.numel + stage.ends.numel
        if self.whole or self.steps_alone:
            return 0.0
        if not self.reduces_each:
            return self.sum_bytes * numel
        return self.partial_bytes * self.shard_of(stage) + self.sent_last(stage)

    @cached_property
    def partial_bytes(self) -> int:
        """Of a number of a gradient that each backward reduces: over replicas only the last one does."""
        return self.layout.reduce_bytes if self.has_replicas else self.master

    @cached_property
    def has_replicas(self) -> bool:
        return self.layout.dp > self.layout.dp_shard

    @cached_property
    def summed_bytes(self) -> int:
        """Of a number of a reduced gradient as it came from the replicas: `fully_shard` keeps that until the last
        backward is done. It is nothing where it is the gradient itself."""
        is_other = self.layout.reduce_bytes != self.master
        return self.layout.reduce_bytes if self.sharded and self.has_replicas and is_other else 0

    def sent_last(self, stage: Stage) -> float:
        """What a backward has sent at its end, which is not waited for."""
        last = stage.ends if stage.ends.numel else self.block
        return self.layout.reduce_bytes * last.padded if self.reduces_each else 0.0

    def half_gradients(self, stage: Stage) -> float:
        """Once the stage has had first halves of backwards: of what is no product."""
        others = stage.blocks * (self.block.numel - self.sizes.products // self.item)
        return 0.0 if self.whole else self.sum_bytes * (others + stage.ends.numel - self.put_off_table(stage))

    def reduced_gradients(self, stage: Stage) -> float:
        """Once it has had its last."""
        if self.whole or self.run.steps_in_backward:
            return 0.0
        return self.master * self.shard_of(stage)

    @property
    def largest(self) -> int:
        """Numbers of the largest parameter that the optimizer steps here."""
        parts = (stage for stage in self.kinds if stage.ends.numel)
        return max(map(self.largest_of, (None, *parts)))

    def largest_of(self, stage: Stage | None) -> int:
        """Of a stage's ends, or of a block."""
        shape, tp = self.run.shape, self.layout.tp
        tables = block_tables(shape, tp) if stage is None else end_tables(shape, stage.part, tp)
        if stage is None and self.run.muon is not None:  # of what it leaves
            tables = tuple(table for table in tables if table.columns == 1)
        return max(table.shard(self.shards) // table.times for table in tables)

    @property
    def tables(self) -> list[Table]:
        """All that it steps, in the model's order."""
        shape, tp, found = self.run.shape, self.layout.tp, []
        for stage in self.stages:
            ends = end_tables(shape, stage.part, tp) if stage.ends.numel else ()
            first = len(end_tables(shape, replace(stage.part, head=False), tp))
            found += [*ends[:first], *block_tables(shape, tp) * stage.blocks, *ends[first:]]
        return found

    @property
    def step_bytes(self) -> float:
        """That the optimizer makes for itself."""
        run, rounded = self.run, self.run.rounded
        if rounded is not None:
            each = None if run.factors else run.step_bytes
            return rounded_step(self.tables, self.shards, self.layout.tp, states=rounded, step_bytes=each)
        if run.factors:
            return adafactor_step(self.tables, self.shards, narrow=self.master == 2)
        most = run.step_bytes * self.largest
        if run.muon is not None:
            ranks, narrow = ranks_of(run), self.master == 2
            most = max(most, muon_step(run.shape, self._blocks, ranks, run.muon, narrow=narrow))
        return most

    @property
    def _blocks(self) -> int:
        return sum(stage.blocks for stage in self.stages)

    @property
    def _hidden_matrices(self) -> int:
        """Numbers of a block that Muon steps here."""
        return sum(table.shard(self.shards) for table in hidden_matrices(self.run.shape, self.layout.tp))

    def shard_of(self, stage: Stage) -> int:
        return stage.blocks * self.block.shard + stage.ends.shard

    def weights(self, *, has_gradients: bool) -> Weights:
        """What a backward does with the gradients that products make."""
        if self.steps_alone:
            return "given"
        if self.whole:
            return "dropped" if self.item < self.master else "in place"
        is_wider = self.sharded and self.layout.reduce_bytes != self.item
        return "kept" if not has_gradients or is_wider or self.reduces_each else "in place"

    @property
    def angles(self) -> float:
        """Of rotary positions, which all blocks read."""
        is_rotary = self.run.shape.positions == "rope" and any(stage.blocks for stage in self.stages)
        return 2.0 * self.item * self.run.seq_len * self.run.shape.head_dim * is_rotary

    @property
    def throughout(self) -> float:
        """Of a step: the batch's ids and labels, and the angles."""
        return 16.0 * self.run.tokens * self.layout.microbatches + self.angles

    # Second halves of backwards.

    def put_off_table(self, stage: Stage) -> int:
        """Numbers of the head's gradient, where it waits for the second half."""
        return self.ends.table * (stage.part.head and self.ends.chunk is None)

    def widened(self, stage: Stage, *, is_split: bool) -> float:
        """The most while gradients of what no block holds are widened one after the other; `is_split`: in the first
        half of a backward."""
        tables = end_tables(self.run.shape, stage.part, self.layout.tp)
        tables = tables[: len(tables) - (is_split and self.put_off_table(stage) > 0)]
        narrow = [self.item * table.numel for table in tables]
        wide = accumulate(self.sum_bytes * table.numel for table in tables)
        return max((sum(narrow[at:]) + each for at, each in enumerate(wide)), default=0.0)

    def put_off_by_head(self, stage: Stage) -> int:
        """What that gradient is made of."""
        return (self.ends.w + self.ends.logits) * (stage.part.head and self.ends.chunk is None)

    @cached_property
    def put_off_by_block(self) -> float:
        """However it is recomputed."""
        return put_off_bytes(self.sizes, "none")

    # Gathered parameters.

    @cached_property
    def frees_forward(self) -> bool:
        """Whether a block's gathered parameters go after its forward, too (`sharding.apply.shard`)."""
        layout = self.layout
        microbatches = layout.microbatches if layout.pp == 1 else max(2, layout.microbatches)
        assert layout.strategy is not None
        return self.sharded and frees_after_forward(layout.strategy, layout.gather, microbatches)

    @cached_property
    def block_gathered(self) -> float:
        return self.item * self.block.padded if self.sharded else 0.0

    @cached_property
    def arriving(self) -> float:
        """A block's parameters as they arrive, before they are where they are used."""
        return self.block_gathered if self.shards > 1 else 0.0

    def ends_gathered(self, stage: Stage) -> float:
        return self.item * stage.ends.padded if self.sharded else 0.0

    def gathered_by_forward(self, stage: Stage) -> float:
        blocks = 0 if self.frees_forward else stage.blocks
        return self.ends_gathered(stage) + blocks * self.block_gathered

    def astray(self, stage: Stage) -> float:
        """What a backward of a stage in the middle has gathered ahead at its end: `fully_shard` takes the forward
        before for what comes next, and that ended with the last block. At an end of the model it ended with what is
        there."""
        is_some = self.walk.frees_each and stage.blocks and not stage.ends.numel
        return self.arriving if is_some else 0.0

    # Activations.

    def recompute(self, index: int) -> BlockRecompute:
        """Of a block, by its index in the whole model."""
        return self._recompute if index % self.layout.recompute_every == 0 else "none"

    @cached_property
    def _recompute(self) -> BlockRecompute:
        kind = self.layout.recompute
        return "full" if kind == "layer" or kind == "op" else kind

    @cached_property
    def _block_kept(self) -> dict[BlockRecompute, float]:
        s = self.sizes
        return {"none": s.kept, "selective": s.kept - s.softmax, "full": s.b}

    def kept_by_blocks(self, stage: Stage, count: int) -> float:
        """By the first `count` of a stage."""
        every, end = self.layout.recompute_every, stage.first + count
        again = -(-end // every) - -(-stage.first // every)
        return again * self._block_kept[self._recompute] + (count - again) * self._block_kept["none"]

    def _stages(self, parts: Iterable[tuple[StageSlice, int]]) -> list[Stage]:
        every = self.layout.recompute_every
        keys = [(part, first % every) for part, first in parts]
        made = {key: self._stage(*key) for key in dict.fromkeys(keys)}
        return [made[key] for key in keys]

    def _stage(self, part: StageSlice, first: int) -> Stage:
        ends, sizes = self.ends, self.sizes
        put_off = 0.0
        bare = Stage(part, first, _unit(self.run.shape, part, self.layout.tp, self.shards), 0.0, 0.0, 0.0)
        kept = self.kept_by_blocks(bare, part.layers)
        kept += part.embedding * (ends.kept_by_embedding + sizes.mask) + part.head * ends.kept_by_head
        if schedule_traits(self.layout.schedule).splits_backward:
            put_off = part.layers * self.put_off_by_block + self.put_off_by_head(bare)
        return Stage(part, first, bare.ends, kept, float(part.head * ends.logits), put_off)


@lru_cache(maxsize=4096)
def _unit(shape: ModelShape, part: StageSlice | None, tp: int, shards: int) -> Unit:
    """Of a stage's ends, or of a block."""
    if part is None:
        last = shape.hidden * (1 if shape.biases else shape.ffn_hidden // tp)  # of the MLP's second layer
        return Unit.of(block_tables(shape, tp), shards, last)
    tables = end_tables(shape, part, tp)
    return Unit.of(tables, shards, tables[-1].numel // tables[-1].times if tables else 0)


def _block_sizes(run: PlannedRun) -> tuple[int, BlockSizes]:
    layout = run.layout
    return _sizes(
        run.shape,
        layout.tp,
        layout.sequence_parallel,
        layout.microbatch_size,
        run.seq_len,
        int(run.item_bytes),
        not run.on_cpu,
        run.drops,
        layout.tp == 1 and run.steps_in_backward,
    )


@lru_cache(maxsize=4096)
def _sizes(
    shape: ModelShape,
    tp: int,
    sequence_parallel: bool,
    batch: int,
    seq: int,
    item_bytes: int,
    fused_norm: bool,
    drops: bool,
    plain: bool,
) -> tuple[int, BlockSizes]:
    """What a norm keeps of a token, and a block's tensors."""
    block = BlockActivations(
        batch=batch,
        seq=seq,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn_hidden=shape.ffn_hidden,
        item_bytes=item_bytes,
        tp=tp,
        sequence_parallel=sequence_parallel,
        fused_norm=fused_norm,
        layer_norm=shape.layer_norm,
        gated=shape.feed_forward_inputs == 2,
        dropout=drops,
    )
    kv_weight = block_tables(shape, tp)[1].rows * shape.hidden
    return block.norm_bytes, BlockSizes.of(block, kv_weight=kv_weight, biases=shape.biases, plain=plain)

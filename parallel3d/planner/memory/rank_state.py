"""What one pipeline rank of a parallel3d run holds: its stages, and their bytes in each state of a step.

Per rank: P parameters, p of them on one data shard with rows filled up to what dp_shard divides, e bytes of an
activation, m of a master weight, r of a gradient on its way, s = dp_shard, k bytes of optimizer states per parameter:

                  one data rank, e = m       NO_SHARD, SHARD_OPTIMIZER      sharded at rest (fully_shard)
    parameters    m P                        e P, and where e < m m P / s   m p
    gradients     m P, from a stage's        m P throughout                 r P whole, from a stage's first backward to
                  first backward on                                         its last (reduce = step), then m p
    optimizer     k P                        k P / s                        k p
    gathered      -                          -                              e s p from a stage's first forward to its
                                                                            last backward (gather = step)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from parallel3d.config.recipe import BlockRecompute
from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.layers.activations import BlockActivations
from parallel3d.optimizers.step_bytes import (
    SteppedPart,
    adafactor_state_bytes,
    adafactor_step_bytes,
    muon_step_bytes,
    rounded_step_bytes,
)
from parallel3d.planner.memory.block_work import BlockTensors, WeightGradients, delayed_bytes
from parallel3d.planner.memory.model_ends import EndTensors
from parallel3d.planner.memory.rank_schedule import RankSchedule
from parallel3d.planner.model.parameters import block_tables, end_tables, hidden_tables, muon_matrices
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import master_bytes
from parallel3d.schedules.registry import schedule_traits
from parallel3d.sharding.bytes import frees_after_forward


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: their number, with rows filled up (`padded`), on one shard,
    and those of the last one."""

    numel: int
    padded: int
    shard: int
    last: int


@dataclass(frozen=True)
class RankStage:
    """A stage of the rank. `first` is its first block's index in the whole model, but for multiples of recompute_every,
    so that stages that hold as much are equal. Bytes are those of one microbatch."""

    part: StageSlice
    first: int
    ends: Unit  # what no block holds
    kept: float  # between forward and backward, the logits aside
    logits: float
    delayed: float  # between the two halves of a split backward
    tied: bool  # the embedding and the head are one table

    @property
    def blocks(self) -> int:
        return self.part.layers


class RankState:
    """The bytes of one pipeline rank."""

    def __init__(self, run: PlannedRun, rank: int) -> None:
        layout = run.layout
        self.run, self.rank, self.layout = run, rank, layout
        self.item = int(run.item_bytes)
        self.master = master_bytes(run.precision)
        self.alone = layout.dp == 1 and self.item == self.master
        self.whole = not self.alone and (layout.dp == 1 or layout.strategy in REPLICATED)
        self.sharded = not self.alone and not self.whole
        self.shards = 1 if self.alone or layout.strategy == "NO_SHARD" else layout.dp_shard
        self.block = _unit(run.shape, None, layout.tp, self.shards)
        activations = _block_activations(run)
        self.tensors = _block_tensors(activations, run.shape, layout.tp)
        self.ends = EndTensors.of(run, norm_bytes=activations.norm_bytes)
        self.splits_backward = schedule_traits(layout.schedule).splits_backward
        self.stages = self._stages(run.stages_of(rank))
        self.kinds = list(dict.fromkeys(self.stages))

        # Gradients. `sum_bytes` are those of a number of a whole gradient; `partial_bytes` of one that each backward
        # reduces, where over replicas only the last one does; `summed_bytes` of what came from the replicas in another
        # dtype than the gradient's, which fully_shard keeps to the end of the last backward.
        self.sum_bytes = layout.reduce_bytes if self.sharded else self.master
        self.reduces_each = self.sharded and layout.reduce == "microbatch"
        self.steps_alone = (
            run.optimizer.steps_in_backward and not self.sharded
        )  # one parameter at a time, in the backward
        has_replicas = layout.dp > layout.dp_shard
        self.partial_bytes = layout.reduce_bytes if has_replicas else self.master
        is_other = layout.reduce_bytes != self.master
        self.summed_bytes = layout.reduce_bytes if self.sharded and has_replicas and is_other else 0

        # Gathered parameters.
        microbatches = layout.microbatches if layout.pp == 1 else max(2, layout.microbatches)
        self.frees_forward = self.sharded and frees_after_forward(layout.strategy, layout.gather, microbatches)
        self.frees_each = self.sharded and layout.gather == "microbatch"
        self.block_gathered = self.item * self.block.padded if self.sharded else 0
        self.arriving = self.block_gathered if self.shards > 1 else 0  # before they are where they are used

    @cached_property
    def schedule(self) -> RankSchedule:
        layout, kinds = self.layout, {kind: at for at, kind in enumerate(self.kinds)}
        return RankSchedule(
            name=layout.schedule,
            pp=layout.pp,
            rank=self.rank,
            microbatches=layout.microbatches,
            virtual_stages=layout.virtual_stages,
            kinds=tuple(kinds[stage] for stage in self.stages),
            frees_each=self.frees_each,
            keeps_gradients=not self.tensors.gathered and not self.tensors.mask,
        )

    @cached_property
    def at_rest(self) -> tuple[float, float, float]:
        """Parameters, gradients and optimizer states that are there throughout a step."""
        run, numel = self.run, sum(stage.blocks * self.block.numel + stage.ends.numel for stage in self.stages)
        shard = sum(map(self.shard_of, self.stages))
        states = run.optimizer.state_bytes * (numel if self.alone else shard)
        if run.optimizer.is_adafactor:
            states = adafactor_state_bytes(self._parts)
        if run.optimizer.muon is not None:
            hidden = sum(table.shard(self.shards) for table in hidden_tables(run.shape, self.layout.tp))
            states -= (run.optimizer.state_bytes - run.optimizer.muon.state_bytes) * self._blocks * hidden
        if self.alone:
            return self.master * numel, 0.0, states
        if self.whole:
            masters = self.master * shard if self.item < self.master else 0
            return self.item * numel + masters, 0.0 if run.optimizer.steps_in_backward else self.master * numel, states
        return self.master * shard, 0.0, states

    @property
    def throughout(self) -> float:
        """The batch's ids and labels, and the angles of rotary positions, during a step."""
        is_rotary = self.run.shape.positions == "rope" and self._blocks > 0
        angles = 2.0 * self.item * self.run.seq_len * self.run.shape.head_dim * is_rotary
        return 16.0 * self.run.tokens * self.layout.microbatches + angles

    @property
    def step_bytes(self) -> float:
        """What the optimizer makes for itself in a step."""
        run, is_narrow = self.run, self.master == 2
        if run.optimizer.stochastic_rounding_states is not None:
            each, states = (
                (None if run.optimizer.is_adafactor else run.optimizer.step_bytes),
                run.optimizer.stochastic_rounding_states,
            )
            return rounded_step_bytes(
                self._parts, tp=self.layout.tp, shards=self.shards, states=states, step_bytes=each
            )
        if run.optimizer.is_adafactor:
            return adafactor_step_bytes(self._parts, shards=self.shards, is_narrow=is_narrow)
        vectors_alone = run.optimizer.muon is not None  # Muon steps the matrices of blocks
        most = run.optimizer.step_bytes * max(self.largest_shard(stage, vectors_alone) for stage in (None, *self.kinds))
        if run.optimizer.muon is None:
            return most
        ranks, tp = self.layout.dp * self.layout.tp, self.layout.tp
        matrices = muon_matrices(run.shape, tp, self.layout.optimizer_shards) * self._blocks
        return max(most, muon_step_bytes(matrices, ranks=ranks, step=run.optimizer.muon, is_narrow=is_narrow))

    def largest_shard(self, stage: RankStage | None, vectors_alone: bool = False) -> int:
        """Numbers of the largest parameter that is stepped here, of a stage's ends or of a block (None)."""
        shape, tp = self.run.shape, self.layout.tp
        tables = block_tables(shape, tp) if stage is None else end_tables(shape, stage.part, tp)
        used = [table for table in tables if stage is not None or not vectors_alone or table.columns == 1]
        return max((table.shard(self.shards) // table.times for table in used), default=0)

    def shard_of(self, stage: RankStage) -> int:
        return stage.blocks * self.block.shard + stage.ends.shard

    # Gradients of a stage.

    def whole_gradients(self, stage: RankStage) -> float:
        """After a backward that is not the stage's last."""
        if self.whole or self.steps_alone:
            return 0.0
        if not self.reduces_each:
            return self.sum_bytes * (stage.blocks * self.block.numel + stage.ends.numel)
        return self.partial_bytes * self.shard_of(stage) + self.sent_last(stage)

    def sent_last(self, stage: RankStage) -> float:
        """What a backward that reduces has sent at its end, which nobody waits for."""
        last = stage.ends if stage.ends.numel else self.block
        return self.layout.reduce_bytes * last.padded if self.reduces_each else 0.0

    def half_gradients(self, stage: RankStage) -> float:
        """After first halves of backwards alone: gradients of what is no product."""
        others = stage.blocks * (self.block.numel - self.tensors.products // self.item)
        return 0.0 if self.whole else self.sum_bytes * (others + stage.ends.numel - self.delayed_table(stage))

    def complete_gradients(self, stage: RankStage) -> float:
        """Returns their bytes after the stage's last backward."""
        return 0.0 if self.whole or self.run.optimizer.steps_in_backward else self.master * self.shard_of(stage)

    def delayed_table(self, stage: RankStage) -> int:
        """Numbers of the head's gradient, where it waits for the second half of a backward."""
        return self.ends.table * (stage.part.head and self.ends.chunk is None)

    def delayed_by_head(self, stage: RankStage) -> int:
        """The factors of that gradient."""
        return (self.ends.hidden_full + self.ends.logits) * (stage.part.head and self.ends.chunk is None)

    @cached_property
    def delayed_by_block(self) -> float:
        return delayed_bytes(self.tensors, "none")

    def weights(self, *, has_gradients: bool) -> WeightGradients:
        """What a backward does with the gradients that products make."""
        if self.steps_alone:
            return "given"
        if self.whole:
            return "dropped" if self.item < self.master else "in place"
        is_wider = self.sharded and self.layout.reduce_bytes != self.item
        return "kept" if not has_gradients or is_wider or self.reduces_each else "in place"

    # Gathered parameters of a stage.

    def ends_gathered(self, stage: RankStage) -> int:
        return self.item * stage.ends.padded if self.sharded else 0

    def gathered_by_forward(self, stage: RankStage) -> int:
        return self.ends_gathered(stage) + (0 if self.frees_forward else stage.blocks * self.block_gathered)

    def prefetched_for_wrong_stage(self, stage: RankStage) -> int:
        """What a backward of a stage in the middle has gathered ahead at its end: fully_shard takes the order of the
        forward before, which ended with the last block."""
        return self.arriving if self.frees_each and stage.blocks and not stage.ends.numel else 0

    # Activations.

    def recompute_of(self, index: int) -> BlockRecompute:
        """How a block is recomputed, by its index in the whole model."""
        kind: BlockRecompute = "selective" if self.layout.recompute == "selective" else "full"
        is_whole = self.layout.recompute == "none" or index % self.layout.recompute_every
        return "none" if is_whole else kind

    def kept_by_blocks(self, stage: RankStage, count: int) -> float:
        """Returns what the first `count` blocks of a stage keep."""
        every, end = self.layout.recompute_every, stage.first + count
        again = -(-end // every) - -(-stage.first // every)
        return again * self.tensors.kept_with(self.recompute_of(0)) + (count - again) * self.tensors.kept

    def kept_by_embedding(self, stage: RankStage) -> int:
        return stage.part.embedding * (self.ends.kept_by_embedding + self.tensors.mask)

    # What the above is made of.

    @property
    def _blocks(self) -> int:
        return sum(stage.blocks for stage in self.stages)

    @property
    def _parts(self) -> list[SteppedPart]:
        """All that the rank steps, in the model's order."""
        shape, tp, found = self.run.shape, self.layout.tp, list[SteppedPart]()
        for stage in self.stages:
            ends = end_tables(shape, stage.part, tp)
            first = len(end_tables(shape, replace(stage.part, head=False), tp))
            for table in (*ends[:first], *block_tables(shape, tp) * stage.blocks, *ends[first:]):
                numel, whole = table.shard(self.shards) // table.times, table.numel // table.times
                found += [SteppedPart(numel, table.columns, whole)] * table.times
        return found

    def _stages(self, parts: Iterable[tuple[StageSlice, int]]) -> list[RankStage]:
        every = self.layout.recompute_every
        keys = [(part, first % every) for part, first in parts]
        made = {key: self._stage(*key) for key in dict.fromkeys(keys)}
        return [made[key] for key in keys]

    def _stage(self, part: StageSlice, first: int) -> RankStage:
        tied = part.embedding and part.head and self.run.shape.tied_embeddings
        bare = RankStage(part, first, _unit(self.run.shape, part, self.layout.tp, self.shards), 0.0, 0.0, 0.0, tied)
        kept = self.kept_by_blocks(bare, part.layers) + self.kept_by_embedding(bare)
        return replace(
            bare,
            kept=kept + part.head * self.ends.kept_by_head,
            logits=float(part.head * self.ends.logits),
            delayed=part.layers * self.delayed_by_block + self.delayed_by_head(bare) if self.splits_backward else 0.0,
        )


@lru_cache(maxsize=4096)
def _unit(shape: ModelShape, part: StageSlice | None, tp: int, shards: int) -> Unit:
    """A stage's ends, or a block (None), whose last parameter is the bias or the weight of the MLP's last layer."""
    tables = block_tables(shape, tp) if part is None else end_tables(shape, part, tp)
    last = tables[-1].numel // tables[-1].times if tables else 0
    if part is None:
        last = shape.hidden * (1 if shape.biases else shape.ffn_hidden // tp)
    shard = sum(table.shard(shards) for table in tables)
    return Unit(sum(table.numel for table in tables), shard * shards, shard, last)


def _block_activations(run: PlannedRun) -> BlockActivations:
    shape, layout = run.shape, run.layout
    return BlockActivations(
        batch=layout.microbatch_size,
        seq=run.seq_len,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn_hidden=shape.ffn_hidden,
        item_bytes=int(run.item_bytes),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        fused_norm=not run.on_cpu,
        layer_norm=shape.layer_norm,
        gated=shape.feed_forward_inputs == 2,
        dropout=run.optimizer.has_dropout,
    )


@lru_cache(maxsize=4096)
def _block_tensors(activations: BlockActivations, shape: ModelShape, tp: int) -> BlockTensors:
    key_weight = block_tables(shape, tp)[1].rows * shape.hidden
    return BlockTensors.of(activations, key_weight=key_weight, biases=shape.biases)

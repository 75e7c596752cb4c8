"""What one pipeline rank of a parallel3d run holds: its stages, and their bytes in each state of a
step.

Per rank: P parameters, p of them on one data shard with rows filled up to what dp_shard divides, e
bytes of an activation, m of a master weight, r of a gradient on its way, s = dp_shard, k bytes of
optimizer states per parameter:

                  one data rank, e = m       NO_SHARD, SHARD_OPTIMIZER      sharded at rest (fully_shard)
    parameters    m P                        e P, and where e < m m P / s   m p
    gradients     m P, from a stage's        m P throughout                 r P whole, from a stage's first backward to
                  first backward on                                         its last (reduce = step), then m p
    optimizer     k P                        k P / s                        k p
    gathered      -                          -                              e s p from a stage's first forward to its
                                                                            last backward (gather = step)

With parallel.offload on GPUs the m p, k p and reduced gradients are on the CPU.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from parallel3d.config.recipe import Recompute
from parallel3d.config.sharding_strategies import REPLICATED, frees_after_forward
from parallel3d.planner.memory.block_work import WeightGradients, block_tensors
from parallel3d.planner.memory.model_ends import EndTensors
from parallel3d.planner.model.muon import muon_matrices, muon_step_bytes
from parallel3d.planner.model.parameters import Table, block_tables, end_tables, hidden_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import master_bytes
from parallel3d.schedules.registry import schedule_traits


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: their number, that with rows filled up
    (`padded`), that on one shard, that of the last one, and that of the largest one's shard."""

    numel: int
    padded: int
    shard: int
    last: int
    largest: int


NO_UNIT = Unit(0, 0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class RankStage:
    """The bytes of a stage of the rank. `first` is its first block's index in the whole model, but
    for multiples of recompute_every, so that stages that hold as much are equal."""

    part: StageSlice
    first: int
    ends: Unit  # what no block holds
    # the last norm and the head, where they are reduced when the head's backward is done
    head: Unit
    # what is reduced when the stage's backward is done: the embedding, and a head that shares its
    # table
    rest: Unit
    # parameters that stay gathered from a forward to its backward, and are gathered for one
    needed_by_loss: float
    kept: float  # by a microbatch between forward and backward, the logits aside
    logits: float
    delayed: float  # by a microbatch between the two halves of a split backward
    gathered: float  # parameters, from a forward on
    whole_gradients: float  # after a backward that is not the stage's last
    reduced_gradients: float  # after that

    @property
    def blocks(self) -> int:
        return self.part.layers

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head share a table here that is gathered."""
        return self.needed_by_loss > 0 and not self.head.numel

    @property
    def by_progress(self) -> tuple[tuple[float, ...], ...]:
        """The bytes that each number of `StageProgress` counts, of gradients, activations, logits
        and buffers."""
        return (
            (0, 0, 0, self.whole_gradients),
            (self.kept, self.delayed, 0, 0),
            (self.logits, 0, 0, 0),
            (0, 0, self.gathered, 0),
        )


class RankState:
    """The bytes of one pipeline rank."""

    def __init__(self, run: PlannedRun, rank: int) -> None:
        layout = run.layout
        self.run = run
        self.rank = rank
        self.layout = layout
        self.item = int(run.item_bytes)
        self.master = master_bytes(run.precision)
        self.offloads = run.offloads
        one_rank = layout.dp == 1 and not layout.offload
        self.alone = one_rank and self.item == self.master
        self.whole = not self.alone and (one_rank or layout.strategy in REPLICATED)
        self.sharded = not self.alone and not self.whole
        self.shards = layout.dp_shard
        if self.alone or layout.strategy == "NO_SHARD":
            self.shards = 1
        # columns of a block's last parameter
        last = 1
        if not run.shape.biases:
            last = run.shape.ffn_hidden // layout.tp
        self.block_unit = _unit(
            block_tables(run.shape, layout.tp), self.shards, last * run.shape.hidden
        )
        self.block = block_tensors(run)
        self.ends = EndTensors.of(run, self.block)
        self.recomputes = layout.recompute in ("full", "every_n")  # whole blocks

        # Bytes of a number of a gradient: of a whole one; of one that each backward reduces, but
        # only the last one over replicas; of a reduced one, with the sum over replicas that
        # fully_shard keeps where its dtype is another.
        self.sum_bytes = self.master
        if self.sharded:
            self.sum_bytes = max(layout.reduce_bytes, self.master)
        self.reduces_each = self.sharded and layout.reduce == "microbatch"
        has_replicas = layout.dp > layout.dp_shard
        self.partial_bytes = layout.reduce_bytes if has_replicas else self.master
        self.reduced_bytes = self.master
        if has_replicas and layout.reduce_bytes != self.master:
            self.reduced_bytes += layout.reduce_bytes
        if self.offloads:
            self.reduced_bytes = 0
        gather = layout.gather_cadence
        self.frees_forward = self.sharded and frees_after_forward(layout.strategy, gather)
        self.frees_each = self.sharded and gather == "microbatch"
        self.block_gathered = 0
        if self.sharded:
            self.block_gathered = self.item * self.block_unit.padded
        # before they are where they are used
        self.arriving = 0
        if self.shards > 1:
            self.arriving = self.block_gathered
        if self.offloads:
            self.arriving += self.master * self.block_unit.shard
        self.slices = run.stages_of(rank)

    @cached_property
    def stages(self) -> list[RankStage]:
        """The rank's stages, which a lower bound of what it holds at rest and between its actions
        does without."""
        slices = [(part, first % self.layout.recompute_every) for part, first in self.slices]
        made = {each: self._stage(*each) for each in dict.fromkeys(slices)}
        return [made[each] for each in slices]

    @cached_property
    def at_rest(self) -> tuple[float, float, float]:
        """Parameters, gradients and optimizer states that are there throughout a step."""
        run = self.run
        if self.offloads:
            return 0.0, 0.0, 0.0
        blocks = self._blocks
        numel = blocks * self.block_unit.numel
        shard = blocks * self.block_unit.shard
        for part, _ in self.slices:
            ends = self._end_unit(embedding=part.embedding, head=part.head)
            numel += ends.numel
            shard += ends.shard
        own = numel if self.alone else shard
        states = run.optimizer.state_bytes * own
        if run.optimizer.muon is not None:
            tables = hidden_tables(run.shape, self.layout.tp)
            hidden = sum(table.shard(self.shards) for table in tables)
            saved_bytes = run.optimizer.state_bytes - run.optimizer.muon.state_bytes
            states -= saved_bytes * blocks * hidden
        if self.whole:
            parameters = self.item * numel
            if self.item < self.master:
                parameters += self.master * shard
            return parameters, self.master * numel, states
        return self.master * own, 0.0, states

    @cached_property
    def throughout(self) -> float:
        """The batch's ids, labels and places in documents, and the angles of rotary positions,
        during a step."""
        is_rotary = self.run.shape.positions == "rope" and self._blocks > 0
        angles = 2.0 * self.item * self.run.seq_len * self.run.shape.head_dim * is_rotary
        ids = 16.0 + 8.0 * self.run.optimizer.has_documents
        return ids * self.run.tokens * self.layout.microbatches + angles

    @property
    def step_bytes(self) -> float:
        """What the optimizer makes for itself in a step."""
        optimizer = self.run.optimizer
        if self.offloads:
            return 0.0
        ends = max(stage.ends.largest for stage in self.stages)
        if optimizer.muon is None:
            return optimizer.step_bytes * max(ends, self.block_unit.largest)
        ranks = self.layout.dp * self.layout.tp
        tp = self.layout.tp
        of_block = muon_matrices(self.run.shape, tp, self.layout.optimizer_shards)
        matrices = of_block * self._blocks
        muon = muon_step_bytes(matrices, ranks=ranks, item_bytes=optimizer.muon.item_bytes)
        return max(optimizer.step_bytes * ends, muon)

    @cached_property
    def sending_bytes(self) -> float:
        """The copies of two buckets of whole gradients on their way over the data ranks, or of
        their parameters when these come back."""
        layout = self.layout
        if not self.whole or layout.dp == 1:
            return 0.0
        block = self.block_unit
        bytes_ = float(layout.reduce_bytes * (layout.reduce_bytes != self.master))
        if self.shards > 1:  # packed first
            bytes_ = layout.reduce_bytes * (1 + 1 / self.shards) + self.master * bool(bytes_) / 2
        bucket = self.run.bucket_bytes / self.master * block.padded / block.numel
        bucket = block.padded * ceil(bucket / block.padded)  # of whole blocks
        packed = 0.0
        for stage in self.stages:
            most = bucket + max(bucket, stage.ends.padded)
            packed += min(block.padded * stage.blocks + stage.ends.padded, most)
        return bytes_ * packed

    def weights(self, *, has_gradients: bool) -> WeightGradients:
        """What a backward does with the gradients that products make: it drops them where they are
        added to others."""
        if self.whole:
            return "dropped"
        is_added_in_other_dtype = self.sharded and self.sum_bytes != self.item
        if not has_gradients or self.reduces_each or is_added_in_other_dtype:
            return "kept"
        return "dropped"

    def reducing(self, unit: Unit, *, is_whole: bool) -> float:
        """A unit's gradients while they are reduced: what is sent, and the new gradients that it is
        made of, beside what arrives; on one shard, where nothing is sent, torch makes copies.
        `is_whole`: they are counted already."""
        reduce = self.layout.reduce_bytes
        sent = reduce * unit.padded
        if self.shards == 1:
            copies = 1 if is_whole else 2
            return sent * (1 + copies)
        if is_whole:
            return sent
        arrived = reduce * unit.shard
        if reduce != self.master:
            arrived += self.master * unit.shard
        last = self.item * unit.last  # which a loop of torch's still has
        return sent + max(self.item * unit.numel, arrived + last)

    def kept_by_blocks(self, first: int, count: int) -> float:
        """Returns what `count` blocks keep of a microbatch from the first one on, an index in the
        whole model."""
        return self._kept_by_blocks(
            first, count, self.layout.recompute, self.layout.recompute_every
        )

    def kept_by_stage(
        self, part: StageSlice, first: int, recompute: Recompute, every: int
    ) -> float:
        """Returns what a stage keeps of a microbatch under a recompute, the logits aside."""
        kept = self._kept_by_blocks(first, part.layers, recompute, every)
        if part.embedding:
            kept += self.ends.kept_by_embedding
        if part.head:
            kept += self.ends.kept_by_head
        return kept

    def _kept_by_blocks(self, first: int, count: int, recompute: Recompute, every: int) -> float:
        again = 0
        if recompute != "none":
            again = -(-(first + count) // every) - -(-first // every)
        kept = self.block.hidden_local
        if recompute == "selective":
            kept = self.block.kept - self.block.attention_own
        return again * kept + (count - again) * self.block.kept

    @cached_property
    def _blocks(self) -> int:
        return sum(part.layers for part, _ in self.slices)

    def _end_unit(self, *, embedding: bool = False, head: bool = False) -> Unit:
        """Returns what a stage with the embedding or the head has of the model beside its
        blocks."""
        if not embedding and not head:
            return NO_UNIT
        ends = StageSlice(layers=0, embedding=embedding, head=head)
        return _unit_of_ends(self.run.shape, ends, self.layout.tp, self.shards)

    def _stage(self, part: StageSlice, first: int) -> RankStage:
        run = self.run
        block = self.block_unit
        is_tied = run.shape.tied_embeddings and part.embedding and part.head
        head = NO_UNIT
        rest = ends = self._end_unit(embedding=part.embedding, head=part.head)
        if self.sharded and part.head and not is_tied:
            head = self._end_unit(head=True)
            rest = self._end_unit(embedding=part.embedding)
        numel = part.layers * block.numel + ends.numel
        shard = part.layers * block.shard + ends.shard
        needed = self.item * (rest if is_tied else head).padded * self.sharded
        kept_gathered = part.layers * self.block_gathered
        if not is_tied:
            kept_gathered += self.item * rest.padded
        is_counted = not self.whole  # others are at rest
        whole = self.sum_bytes * numel
        if self.reduces_each:  # the last unit's are on their way for as long as nobody waits
            if rest.numel:
                last = rest
            elif part.layers:
                last = block
            else:
                last = head
            whole = self.partial_bytes * shard + self.layout.reduce_bytes * last.padded
        splits = schedule_traits(self.layout.schedule).splits_backward
        return RankStage(
            part=part,
            first=first,
            ends=ends,
            head=head,
            rest=rest,
            needed_by_loss=needed,
            kept=self.kept_by_stage(
                part, first, self.layout.recompute, self.layout.recompute_every
            ),
            logits=part.head * self.ends.logits,
            delayed=splits * (part.layers * self.block.delayed + part.head * self.ends.delayed),
            gathered=needed + kept_gathered * (self.sharded and not self.frees_forward),
            whole_gradients=whole * is_counted,
            reduced_gradients=self.master * shard * is_counted * (not self.offloads),
        )


@lru_cache(maxsize=4096)
def _unit(tables: tuple[Table, ...], shards: int, last: int) -> Unit:
    numel = sum(table.numel for table in tables)
    shard = sum(table.shard(shards) for table in tables)
    each = [table.shard(shards) // table.times for table in tables]
    return Unit(numel, shard * shards, shard, last, largest=max(each, default=0))


@lru_cache(maxsize=4096)
def _unit_of_ends(shape: ModelShape, ends: StageSlice, tp: int, shards: int) -> Unit:
    tables = end_tables(shape, ends, tp)
    last = tables[-1]
    return _unit(tables, shards, last.rows * last.columns)

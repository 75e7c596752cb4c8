"""The named moments of a step at which a rank of a parallel3d run may hold most, each a sum of bytes by kind.

    forward            the last block of a stage's forward, when most forwards are alive
    loss               the head and the loss, of the stage that has them
    first backward     a block of a backward that makes a stage's gradients, with the block's recompute
    backward           a block of one that adds to them, or the second half of a split backward
    last backward      a block of the one that completes them, which reduces them over the data ranks
    optimizer's step   what the optimizer makes for itself

An action goes through its stage's blocks one after the other, and what it holds grows or shrinks by the same from one
to the next, so that the first and the last ones are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import mul
from typing import Literal, NamedTuple

from parallel3d.planner.memory.block_work import backward_work, forward_work, second_half_work
from parallel3d.planner.memory.buckets import buckets_of, published_bytes, under_way
from parallel3d.planner.memory.model_ends import (
    embedding_backward,
    head_backward,
    head_forward,
    loss_backward,
    loss_forward,
)
from parallel3d.planner.memory.rank_schedule import BeforeAction, grouped_moments
from parallel3d.planner.memory.rank_state import RankStage, RankState, Unit
from parallel3d.planner.model.parameters import end_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.schedules.schedule import Kind

Moment = Literal["forward", "loss", "first backward", "backward", "last backward", "optimizer's step"]


class MemorySnapshot(NamedTuple):
    """Bytes of a rank at one moment, by kind, beside what it holds throughout a step."""

    moment: Moment
    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    temporary: float = 0.0

    @property
    def total(self) -> float:
        return self[1] + self[2] + self[3] + self[4] + self[5]

    def plus(
        self,
        *,
        gradients: float = 0.0,
        activations: float = 0.0,
        logits: float = 0.0,
        buffers: float = 0.0,
        temporary: float = 0.0,
    ) -> MemorySnapshot:
        """Returns the same moment with more bytes, or fewer."""
        return MemorySnapshot(
            self[0],
            self[1] + gradients,
            self[2] + activations,
            self[3] + logits,
            self[4] + buffers,
            self[5] + temporary,
        )


def fullest_moment(run: PlannedRun, rank: int) -> tuple[RankState, MemorySnapshot]:
    """The rank, and the moment of a step when it holds most."""
    state = RankState(run, rank)
    moments = _Moments(state)
    return state, max(moments.all(), key=lambda snapshot: snapshot.total)


class _Moments:
    """The moments of one rank."""

    def __init__(self, rank: RankState) -> None:
        self.rank = rank
        kinds = rank.kinds
        sends = rank.whole and rank.layout.dp > 1
        self._sent = [under_way(rank.run, kind.part) * sends for kind in kinds]
        self._kept = [kind.kept for kind in kinds]
        self._logits = [kind.logits for kind in kinds]
        self._delayed = [kind.delayed for kind in kinds]
        self._gathered = [float(rank.gathered_by_forward(kind)) for kind in kinds]
        self._astray = [float(rank.prefetched_for_wrong_stage(kind)) for kind in kinds]
        self._whole = [rank.whole_gradients(kind) for kind in kinds]
        self._complete = [rank.complete_gradients(kind) for kind in kinds]
        self._half = [rank.half_gradients(kind) for kind in kinds]
        rows = zip(
            self._kept,
            self._logits,
            self._delayed,
            self._gathered,
            self._astray,
            self._whole,
            self._complete,
            self._sent,
            self._half,
            strict=True,
        )
        self._each = [
            each
            for kept, logits, delayed, gathered, astray, whole, complete, sent, half in rows
            for each in (kept + logits, delayed, gathered, astray, whole, complete + sent, half)
        ]
        self._groups, self._received = grouped_moments(rank.schedule)
        self._arounds: dict[BeforeAction, MemorySnapshot] = {}

    def all(self) -> Iterator[MemorySnapshot]:
        """All moments. Of those that differ in what other stages hold alone the fullest is enough."""
        local = self.rank.tensors.hidden_local
        for group in self._groups:
            action = max(group, key=lambda one: sum(map(mul, one.counts, self._each)) + one.in_flight * local)
            stage = self.rank.stages[action.stage]
            if action.kind is Kind.FORWARD:
                yield from self._forward(action, stage)
            elif action.kind is Kind.WEIGHT:
                yield from self._second_half(action, stage)
            elif self.rank.steps_alone:
                yield from self._stepped_backward(action, stage)
            else:
                yield from self._backward(action, stage)
        yield from self._at_the_end()

    def _around(self, action: BeforeAction, stage: RankStage) -> MemorySnapshot:
        """Returns what other stages and other microbatches hold during an action."""
        if action not in self._arounds:
            self._arounds[action] = self._compute_around(action, stage)
        return self._arounds[action]

    def _compute_around(self, action: BeforeAction, stage: RankStage) -> MemorySnapshot:
        rank, takes = self.rank, action.kind in (Kind.BACKWARD, Kind.INPUT)
        alive, complete = action.tally(0), action.tally(5)
        gathered = sum(map(mul, action.tally(2), self._gathered)) + sum(map(mul, action.tally(3), self._astray))
        gradients = sum(map(mul, action.tally(4), self._whole)) + sum(map(mul, complete, self._complete))
        sent = sum(map(mul, complete, self._sent))
        return MemorySnapshot(
            self._moment(action),
            gradients + sum(map(mul, action.tally(6), self._half)) - self._own_gradients(action, stage),
            sum(map(mul, alive, self._kept))
            + sum(map(mul, action.tally(1), self._delayed))
            + rank.throughout
            - takes * stage.kept,
            sum(map(mul, alive, self._logits)) - takes * stage.logits,
            gathered - self._own_gathered(action, stage) + action.in_flight * rank.tensors.hidden_local + sent,
        )

    def _moment(self, action: BeforeAction) -> Moment:
        if action.kind is Kind.FORWARD:
            return "forward"
        if action.is_last:
            return "last backward"
        return "backward" if action.gradients == "whole" else "first backward"

    def _own_gradients(self, action: BeforeAction, stage: RankStage) -> float:
        """The stage's gradients when the action begins."""
        if action.gradients == "whole":
            return self.rank.whole_gradients(stage)
        return self.rank.half_gradients(stage) if action.gradients == "half" else 0.0

    def _own_gathered(self, action: BeforeAction, stage: RankStage) -> float:
        """The stage's gathered parameters when the action begins."""
        if action.last_done == "forward":
            return self.rank.gathered_by_forward(stage)
        return self.rank.prefetched_for_wrong_stage(stage) if action.last_done == "backward" else 0.0

    # A forward, and the loss.

    def _forward(self, action: BeforeAction, stage: RankStage) -> Iterator[MemorySnapshot]:
        rank, ends, local = self.rank, self.rank.ends, self.rank.tensors.hidden_local
        is_gathering = rank.sharded and (action.last_done != "forward" or rank.frees_forward)
        arriving = rank.arriving if is_gathering else 0
        gathered = rank.gathered_by_forward(stage) + (rank.block_gathered if rank.frees_forward else 0)
        base = self._around(action, stage).plus(
            gradients=self._own_gradients(action, stage), activations=rank.kept_by_embedding(stage), buffers=gathered
        )
        last, ahead = stage.blocks - 1, rank.layout.prefetch
        # Blocks ahead arrive while an earlier one is at work; at the last one nothing is ahead.
        early = [max(0, last - ahead)] if rank.layout.prefetches_forward and rank.frees_forward else []
        for at in [last, *early] if stage.blocks else []:
            coming = arriving + rank.arriving * min(ahead, last - at)
            work = forward_work(rank.tensors, rank.recompute_of(stage.first + at)).peak
            kept = rank.kept_by_blocks(stage, at) + local
            yield base.plus(activations=kept, buffers=coming, temporary=work)
            if is_gathering and at == last:  # what the unit before arrived in goes when the last block is gathered
                before = arriving if last else rank.ends_gathered(stage) * (rank.shards > 1)
                wrong = rank.prefetched_for_wrong_stage(stage) * (action.last_done == "backward" and last > 1)
                yield base.plus(activations=kept, buffers=arriving + before + wrong)
        if stage.part.head:
            kept = rank.kept_by_blocks(stage, stage.blocks) + local
            freed = rank.block_gathered if rank.frees_forward else 0
            base = base.plus(activations=kept, buffers=-freed)._replace(moment="loss")
            yield base.plus(buffers=arriving, temporary=head_forward(ends).peak)
            yield base.plus(temporary=loss_forward(ends))

    # A backward, or the first half of a split one.

    def _backward(self, action: BeforeAction, stage: RankStage) -> Iterator[MemorySnapshot]:
        rank, ends, blocks, local = self.rank, self.rank.ends, stage.blocks, self.rank.tensors.hidden_local
        prefetch = rank.layout.prefetch
        if rank.whole and action.is_last:
            yield from self._sending(action, stage)
        has_gradients = action.gradients == "whole"
        made = rank.weights(has_gradients=action.gradients != "none")  # what it does with gradients of norms and tables
        weights = "later" if action.kind is Kind.INPUT else rank.weights(has_gradients=has_gradients)
        table = 0  # the gradient of the head's weight, which waits until the stage is done
        if stage.part.head:
            of_table = weights if ends.chunk is None else made
            yield from self._head_backward(action, stage, of_table)
            table = rank.item * ends.table if of_table == "kept" else 0
        if rank.sharded and stage.ends.numel and action.last_done == "backward":  # the ends are gathered again
            base = self._in_backward(action, stage, blocks, blocks, head=stage.part.head)
            again = rank.ends_gathered(stage) * (2 if rank.shards > 1 else 1)
            yield base.plus(buffers=again - self._gathered_at(action, stage, blocks))
        reduces = action.is_last or rank.reduces_each
        is_even = not reduces and not rank.frees_each and not rank.frees_forward
        for at in self._places(blocks, is_even=is_even):
            is_first = at == blocks - 1 and not stage.part.head
            work = backward_work(rank.tensors, rank.recompute_of(stage.first + at), weights, is_received=is_first).peak
            begins = self._in_backward(action, stage, at, at + 1).plus(temporary=table + (0 if is_first else local))
            yield begins.plus(temporary=work)
            if not self._is_gathered(action) and (at == 0 or at < min(prefetch, blocks - 1)):
                wrong = rank.prefetched_for_wrong_stage(stage) * (at == 0)
                yield begins.plus(buffers=rank.arriving - wrong)  # its own parameters are still to arrive
            if rank.sharded and weights == "kept" and (reduces or at == 0):
                yield self._block_done(action, stage, at, table)
        if stage.part.embedding:
            work = embedding_backward(ends, made)
            yield self._in_backward(action, stage, -1, 0).plus(temporary=local + work + table)
        if rank.sharded and stage.ends.numel:
            embedding = 0
            if stage.part.embedding and made == "kept":  # a tied table's gradient is added to the head's
                embedding = rank.item * ends.table * (not (table and stage.tied)) + ends.positions
            yield self._ends_done(action, stage, table + embedding)

    def _places(self, blocks: int, *, is_even: bool) -> list[int]:
        """The blocks to look at; `is_even`: from one to the next what is held changes by the same throughout."""
        near = self.rank.layout.recompute_every + (0 if is_even else 1)
        first = near if is_even else max(near, self.rank.layout.prefetch + 1)  # from there on fewer are gathered ahead
        return [at for at in range(blocks) if at < first or at >= blocks - near]

    def _head_backward(self, action: BeforeAction, stage: RankStage, weights: str) -> Iterator[MemorySnapshot]:
        """Yields the loss, then the head: all of the stage's blocks wait."""
        rank, ends, blocks = self.rank, self.rank.ends, stage.blocks
        base = self._in_backward(action, stage, blocks, blocks, head=True)
        if ends.chunk is None:  # a block is gathered ahead only when the head begins
            ahead = 0 if self._is_gathered(action) or not blocks else rank.arriving
            yield base.plus(buffers=-ahead, temporary=loss_backward(ends))._replace(moment="loss")
        adds = action.gradients != "none" and not rank.reduces_each and (rank.alone or rank.item == 4)
        has_sum = (rank.whole or adds) and rank.sum_bytes == 4
        yield base.plus(temporary=head_backward(ends, weights, has_sum=has_sum))

    def _in_backward(
        self, action: BeforeAction, stage: RankStage, at: int, kept: int, *, head: bool = False
    ) -> MemorySnapshot:
        """While block `at` is differentiated (the number of blocks: the head; -1: the embedding), the first `kept`
        blocks of this microbatch being there."""
        rank, part, local = self.rank, stage.part, self.rank.tensors.hidden_local
        held = rank.kept_by_blocks(stage, kept) + rank.kept_by_embedding(stage) + head * rank.ends.kept_by_head
        held += local * (kept == 0 and not head and not part.embedding)  # the runtime still has the stage's input
        if action.kind is Kind.INPUT and part.layers:  # what is left for the second half
            held += (stage.blocks - kept) * rank.delayed_by_block + (not head) * rank.delayed_by_head(stage)
            if rank.schedule.keeps_gradients and kept < stage.blocks and not part.head:
                held -= local  # the gradient that was taken, which waits already
        return self._around(action, stage).plus(
            gradients=self._gradients_at(action, stage, at),
            activations=held,
            logits=head * stage.logits,
            buffers=self._gathered_at(action, stage, at) + self._reducing_at(action, stage, at),
        )

    def _gradients_at(self, action: BeforeAction, stage: RankStage, at: int) -> float:
        """The stage's gradients, whole or reduced, while block `at` is at work."""
        rank, block, own = self.rank, self.rank.block, self._own_gradients(action, stage)
        later, has_gradients = max(stage.blocks - 1 - at, 0), action.gradients == "whole"  # blocks that are done
        if rank.whole or rank.steps_alone or action.kind is Kind.INPUT:
            return own
        if rank.alone:
            return own + (0.0 if has_gradients else rank.master * block.numel * later)
        reduced = (rank.master + rank.summed_bytes) * block.shard * later
        if rank.reduces_each:
            partial, waits = rank.partial_bytes * block.shard * later, own - rank.sent_last(stage)
            if not action.is_last:
                return waits if has_gradients else partial
            return waits - partial + reduced if has_gradients else reduced
        if action.is_last:
            reduced *= not rank.run.optimizer.steps_in_backward
            return own - has_gradients * rank.sum_bytes * block.numel * later + reduced
        return own + (0.0 if has_gradients else rank.sum_bytes * block.numel * later)

    def _reducing_at(self, action: BeforeAction, stage: RankStage, at: int) -> float:
        """What the block before (in the order of a backward) has sent, until the next one sends."""
        rank = self.rank
        if at < stage.blocks - 1:
            sends = rank.sharded and action.kind is Kind.BACKWARD and (action.is_last or rank.reduces_each)
            return rank.layout.reduce_bytes * rank.block.padded if sends else 0.0
        return rank.sent_last(stage) if action.gradients == "whole" else 0.0

    def _frees(self, action: BeforeAction) -> bool:
        """Whether this backward frees parameters as it goes."""
        rank = self.rank
        return rank.sharded and (rank.frees_each or (action.is_last and action.kind is Kind.BACKWARD))

    def _is_gathered(self, action: BeforeAction) -> bool:
        """Whether the stage's blocks are gathered when a backward begins."""
        return not self.rank.sharded or (action.last_done == "forward" and not self.rank.frees_forward)

    def _gathered_at(self, action: BeforeAction, stage: RankStage, at: int) -> float:
        """The stage's gathered parameters while block `at` is at work."""
        rank = self.rank
        if not rank.sharded:
            return 0.0
        ends, block, wrong = rank.ends_gathered(stage), rank.block_gathered, rank.prefetched_for_wrong_stage(stage)
        if self._is_gathered(action) and not self._frees(action):
            return ends + stage.blocks * block
        if self._is_gathered(action):
            if action.is_last:  # the last one of several microbatches gathers nothing ahead
                is_ahead = rank.layout.microbatches == 1 and stage.blocks > 1 and not stage.ends.numel
                wrong = rank.arriving * is_ahead
            return ends + min(at + 1, stage.blocks) * block + wrong * (at == 0)
        if at == stage.blocks:  # the head, with the last block ahead, unless head and loss are one
            return ends + (rank.arriving if stage.blocks and rank.ends.chunk is None else 0)
        here = block if at >= 0 else 0
        return ends + here + (rank.arriving * min(rank.layout.prefetch, at) if at > 0 else wrong)

    # The second half of a split backward.

    def _second_half(self, action: BeforeAction, stage: RankStage) -> Iterator[MemorySnapshot]:
        rank, blocks, has_gradients = self.rank, stage.blocks, action.gradients == "whole"
        weights = rank.weights(has_gradients=has_gradients)
        held = self._around(action, stage).plus(
            gradients=self._own_gradients(action, stage), buffers=self._own_gathered(action, stage)
        )
        table = rank.item * rank.delayed_table(stage)
        yield held.plus(temporary=0.0 if weights == "in place" else table)
        made, each = (table, rank.tensors.products) if weights == "kept" else (0, 0)
        work = second_half_work(rank.tensors, weights).peak
        # The memory that the gradient was received into stays.
        received = rank.tensors.hidden_local if rank.schedule.keeps_gradients and not stage.part.head else 0
        for done in (0, blocks - 1) if blocks else ():
            gone = rank.delayed_by_head(stage) + done * rank.delayed_by_block - received * (done > 0)
            yield held.plus(activations=-gone, temporary=made + done * each + work)
        used_up = received - stage.delayed
        if rank.whole and action.is_last:
            yield from (moment.plus(activations=used_up) for moment in self._sending(action, stage))
        if not rank.sharded:
            return
        after = held.plus(
            gradients=rank.sum_bytes * (blocks * rank.block.numel + stage.ends.numel)
            - self._own_gradients(action, stage),
            activations=used_up,
        )
        if not has_gradients and rank.sum_bytes != rank.item:  # the head's gradient is widened first
            narrow = (rank.sum_bytes - rank.item) * blocks * rank.tensors.products / rank.item
            yield after.plus(temporary=max(rank.tensors.weights[-1] if blocks else 0, table - narrow))
        if action.is_last:
            unit, freed = (rank.block, rank.block_gathered) if blocks else (stage.ends, rank.ends_gathered(stage))
            whole = rank.sum_bytes * unit.numel
            freed *= self._is_gathered(action)
            yield after.plus(buffers=-freed, temporary=self._reducing(None, unit, 0.0, whole))
            unit = stage.ends if stage.ends.numel else rank.block  # the last of them
            whole = rank.sum_bytes * unit.numel
            reduced = (rank.master + rank.summed_bytes) * (rank.shard_of(stage) - unit.shard)
            last = after.plus(
                buffers=-self._own_gathered(action, stage), temporary=self._reducing(None, unit, 0.0, whole)
            )
            yield last.plus(gradients=whole + reduced - rank.sum_bytes * (blocks * rank.block.numel + stage.ends.numel))

    # The end of a unit's backward in fully_shard.

    def _block_done(self, action: BeforeAction, stage: RankStage, at: int, table: int) -> MemorySnapshot:
        """A block's gradients are widened, or reduced, and those of its products go."""
        rank, block = self.rank, self.rank.block
        base = self._in_backward(action, stage, at, at).plus(
            buffers=-rank.block_gathered if self._frees(action) else 0, temporary=rank.tensors.hidden_local + table
        )
        has_gradients = action.gradients == "whole"
        if action.is_last or rank.reduces_each:
            is_whole = has_gradients and not rank.reduces_each
            new, whole = (0, rank.sum_bytes * block.numel) if is_whole else (rank.item * block.numel, 0)
            # The block before is done with what it has sent.
            sent = self._reducing_at(action, stage, at)
            return base.plus(buffers=-sent, temporary=self._reducing(None, block, new, whole))
        if has_gradients:
            return base
        return base.plus(temporary=rank.sum_bytes * block.numel + rank.tensors.weights[-1])

    def _ends_done(self, action: BeforeAction, stage: RankStage, own: float) -> MemorySnapshot:
        """The same for what no block holds."""
        rank, ends = self.rank, stage.ends
        base = self._in_backward(action, stage, -1, 0).plus(
            buffers=-rank.ends_gathered(stage) if self._frees(action) else 0,
            temporary=0 if stage.part.embedding else rank.tensors.hidden_local,  # the gradient of the input
        )
        if (action.is_last and action.kind is Kind.BACKWARD) or rank.reduces_each:
            is_whole = action.gradients == "whole" and not rank.reduces_each
            new, whole = (0.0, rank.sum_bytes * ends.numel) if is_whole else (own, 0.0)
            sent = self._reducing_at(action, stage, -1)
            return base.plus(buffers=-sent, temporary=self._reducing(stage, ends, new, whole))
        if action.gradients == "none" and rank.sum_bytes != rank.item:
            own = self._widened(stage, is_split=action.kind is Kind.INPUT)
        return base.plus(temporary=own)

    def _widened(self, stage: RankStage, *, is_split: bool) -> float:
        """The most while gradients of what no block holds are widened one after the other."""
        rank = self.rank
        tables = end_tables(rank.run.shape, stage.part, rank.layout.tp)
        tables = tables[: len(tables) - (is_split and rank.delayed_table(stage) > 0)]
        narrow = [rank.item * table.numel for table in tables]
        wide = accumulate(rank.sum_bytes * table.numel for table in tables)
        return max((sum(narrow[at:]) + each for at, each in enumerate(wide)), default=0.0)

    def _reducing(self, stage: RankStage | None, unit: Unit, new: float, whole: float) -> float:
        """A unit's gradients while they are reduced: what is sent, beside it first those that it is made of (`new`
        ones, and `whole` ones, which are counted already), then what arrives, then the gradient in its own dtype, or
        the step that is made with it. On one shard, where nothing is sent, torch makes a copy between; on several a
        loop of its own still has the last gradient."""
        rank, reduce = self.rank, self.rank.layout.reduce_bytes
        sent, arrived = reduce * unit.padded, reduce * unit.shard
        copied = sent if rank.shards == 1 else 0
        rounded = rank.master * unit.shard * (reduce != rank.master)
        last = unit.last * (rank.item if new else rank.sum_bytes) if rank.shards > 1 else 0
        most = sent + max(new, arrived + max(copied, rounded) + last - whole)
        if not rank.run.optimizer.steps_in_backward:
            return most
        step = rank.run.optimizer.step_bytes * rank.largest_shard(stage)
        return max(
            most, sent + max(new > 0, arrived + max(copied, rounded) + last - whole) - arrived * (rounded > 0) + step
        )

    # Buckets of whole gradients.

    def _sending(self, action: BeforeAction, stage: RankStage) -> Iterator[MemorySnapshot]:
        """Yields the last backward of a stage, bucket after bucket."""
        rank, splits, local = self.rank, action.kind is Kind.WEIGHT, self.rank.tensors.hidden_local
        if rank.layout.dp == 1:
            return
        before = 0.0
        for bucket in buckets_of(rank.run, stage.part):
            at, work = bucket.before - 1, 0.0
            if at >= 0 and not splits:
                weights = rank.weights(has_gradients=True)
                work = local + backward_work(rank.tensors, rank.recompute_of(stage.first + at), weights).peak
            kept = rank.kept_by_blocks(stage, bucket.before) + rank.kept_by_embedding(stage)
            sent, packing = before + bucket.copied + work, before + bucket.packing + local * (not splits)
            yield self._around(action, stage).plus(activations=0 if splits else kept, temporary=max(sent, packing))
            before = bucket.copied

    def _at_the_end(self) -> Iterator[MemorySnapshot]:
        """Yields the last buckets of all stages, and the optimizer's step."""
        rank = self.rank
        received = self._received * rank.tensors.hidden_local
        step = 0.0 if rank.run.optimizer.steps_in_backward else rank.step_bytes
        if rank.whole:
            sent = [self._sent[kind] for kind in rank.schedule.kinds]
            packing = max(buckets_of(rank.run, stage.part)[-1].packing for stage in rank.stages)
            in_buckets = sum(sent) + max(0.0, packing - min(sent)) if rank.layout.dp > 1 else 0.0
            yield MemorySnapshot("last backward", 0.0, rank.throughout, 0.0, received, in_buckets)
            step = max(step, *(published_bytes(rank.run, stage.part) for stage in rank.kinds))
        gradients = sum(map(rank.complete_gradients, rank.stages))
        yield MemorySnapshot("optimizer's step", gradients, rank.throughout, 0.0, received, step)

    # A backward that steps each parameter when its gradient is complete.

    def _stepped_backward(self, action: BeforeAction, stage: RankStage) -> Iterator[MemorySnapshot]:
        """Yields the blocks of a backward that steps. Beside whole parameters there are the bucket that fills and the
        two before it, which are on their way or are stepped; one data rank without buckets has one gradient."""
        rank, ends, blocks, local = self.rank, self.rank.ends, stage.blocks, self.rank.tensors.hidden_local
        table = rank.item * ends.table * stage.tied  # a tied table's gradient waits for the embedding
        buckets = buckets_of(rank.run, stage.part) if rank.whole else ()
        step = rank.run.optimizer.step_bytes * rank.largest_shard(stage) * rank.alone
        for at in range(blocks if stage.part.head else blocks - 1, -2, -1):
            base = self._in_backward(action, stage, at, min(at + 1, blocks), head=at == blocks)
            if at == blocks:
                work = max(head_backward(ends, "given", has_sum=False), loss_backward(ends))
            elif at >= 0:
                work = backward_work(rank.tensors, rank.recompute_of(stage.first + at), "given").peak + local + table
            else:
                work = (embedding_backward(ends, "given") if stage.part.embedding else 0.0) + local + table
            yield base.plus(temporary=work + step)
            for index, bucket in enumerate(buckets):
                if max(at, 0) in bucket.blocks:
                    before = buckets[max(0, index - 2) : index] if rank.layout.dp > 1 else ()
                    waiting = [one.memory + one.copied for one in before]
                    oldest = before[0] if len(before) == 2 else bucket
                    yield base.plus(temporary=work + sum(waiting) + bucket.memory)
                    stepped = sum(waiting) + bucket.memory + rank.run.optimizer.step_bytes * oldest.stepping
                    sent = sum(waiting[1:]) + bucket.memory + max(bucket.copied, bucket.packing)
                    yield base.plus(temporary=2 * local + table + max(stepped, sent))

"""The moments within an action of a rank at which it may hold most, each as (what, bytes of gradients, activations,
logits, buffers, temporaries). An action goes through its stage's blocks one after the other, and what it holds grows or
shrinks by the same from one to the next: the first and the last ones are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import add, mul

from parallel3d.planner.own.buckets import sent_by
from parallel3d.planner.own.ends import embedding_backward, head_backward, head_forward, loss_backward, loss_forward
from parallel3d.planner.own.moment import Around, Moment, What, total
from parallel3d.planner.own.rank import Rank, Stage, Unit
from parallel3d.planner.own.states import State, fullest_states, received_into
from parallel3d.planner.own.work import Weights, backward_work, forward_work, weights_work
from parallel3d.schedules.schedule import Kind


class Moments:
    """Of one rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        kinds = rank.kinds
        self._activations = [kind.kept for kind in kinds] + [kind.put_off for kind in kinds]
        self._logits = [kind.logits for kind in kinds]
        self._gathered = [rank.gathered_by_forward(kind) for kind in kinds] + [rank.astray(kind) for kind in kinds]
        self._gradients = [
            *map(rank.whole_gradients, kinds),
            *map(rank.reduced_gradients, kinds),
            *map(rank.half_gradients, kinds),
        ]
        sends = rank.whole and rank.layout.dp > 1
        self._sent = [sent_by(rank.run, kind.part)[-1].bytes if sends else 0.0 for kind in kinds]

    def fullest(self) -> Moment:
        """Of all actions. What an action makes for itself does not depend on what others hold, so that of states that
        differ in that alone the fullest is enough."""
        kinds = len(self._logits)
        alive = map(add, self._activations, self._logits)
        done = map(add, self._gradients[kinds:], self._sent)
        gradients = (*self._gradients[:kinds], *done, *self._gradients[2 * kinds :])
        each = (*alive, *self._activations[kinds:], *self._gathered, *gradients, self.rank.sizes.b)

        def held(state: State) -> float:
            return sum(map(mul, state.counts, each))

        fullest = (max(some, key=held) if len(some) > 1 else some[0] for some in fullest_states(self.rank.walk))
        moments = (moment for state in fullest for moment in self.of(state))
        return max(chain(moments, self.at_the_end()), key=total)

    def of(self, state: State) -> Iterator[Moment]:
        stage = self.rank.stages[state.stage]
        around = self._around(state, stage)
        if state.kind is Kind.FORWARD:
            yield from self._forward(state, stage, around)
        elif state.kind is Kind.WEIGHT:
            yield from self._second_half(state, stage, around)
        else:
            yield from self._backward(state, stage, around)

    def _around(self, state: State, stage: Stage) -> Around:
        rank = self.rank
        own = rank.whole_gradients(stage) if state.has_gradients else state.has_half * rank.half_gradients(stage)
        gathered = {"nothing": 0.0, "forward": rank.gathered_by_forward(stage), "backward": rank.astray(stage)}
        takes = state.kind in (Kind.BACKWARD, Kind.INPUT)
        counts, kinds = state.counts, len(self._logits)
        return Around(
            gradients=sum(map(mul, counts[4 * kinds :], self._gradients)) - own,
            activations=sum(map(mul, counts, self._activations)) - takes * stage.kept + self.rank.throughout,
            logits=sum(map(mul, counts, self._logits)) - takes * stage.logits,
            gathered=sum(map(mul, counts[2 * kinds :], self._gathered)) - gathered[state.had],
            waiting=state.waiting * rank.sizes.b + sum(map(mul, state.of("done"), self._sent)),
            own_gradients=own,
        )

    # A forward.

    def _forward(self, state: State, stage: Stage, around: Around) -> Iterator[Moment]:
        rank, part = self.rank, stage.part
        is_gathering = rank.sharded and (state.had != "forward" or rank.frees_forward)
        arriving = rank.arriving if is_gathering else 0.0
        astray = rank.astray(stage) if state.had == "backward" else 0.0
        gathered = rank.gathered_by_forward(stage) + (rank.block_gathered if rank.frees_forward else 0.0)
        held = part.embedding * (rank.ends.kept_by_embedding + rank.sizes.mask)

        def moment(kept: float, buffers: float, temporary: float) -> Moment:
            return Moment(
                "forward",
                around.gradients + around.own_gradients,
                around.activations + held + kept,
                around.logits,
                around.gathered + around.waiting + buffers,
                temporary,
            )

        if stage.blocks:
            last = stage.blocks - 1
            kept = rank.kept_by_blocks(stage, last) + rank.sizes.b
            work = forward_work(rank.sizes, rank.recompute(stage.first + last))
            yield moment(kept, gathered + arriving, work.peak)
            if is_gathering:  # what the unit before arrived in goes when the last block is where it is used
                before = arriving if last else rank.ends_gathered(stage) * (rank.shards > 1)
                yield moment(kept, gathered + arriving + before + astray * (last > 1), 0.0)
                if rank.layout.prefetches_forward and rank.frees_forward:
                    for at in range(max(0, last - rank.layout.prefetch), last):
                        ahead = rank.arriving * min(rank.layout.prefetch, last - at)
                        kept = rank.kept_by_blocks(stage, at) + rank.sizes.b
                        work = forward_work(rank.sizes, rank.recompute(stage.first + at))
                        yield moment(kept, gathered + arriving + ahead, work.peak)
        if part.head:
            ends = rank.ends
            kept = rank.kept_by_blocks(stage, stage.blocks) + ends.b
            freed = rank.block_gathered if rank.frees_forward else 0.0
            yield moment(kept, gathered - freed + arriving, head_forward(ends).peak)
            yield moment(kept, gathered - freed, loss_forward(ends))

    # A backward, or its first half.

    def _backward(self, state: State, stage: Stage, around: Around) -> Iterator[Moment]:
        rank, ends, blocks = self.rank, self.rank.ends, stage.blocks
        if rank.whole and state.is_last:
            yield from self._sending(state, stage, around)
        made = rank.weights(has_gradients=state.has_half)  # of what is not put off
        weights = "later" if state.kind is Kind.INPUT else rank.weights(has_gradients=state.has_gradients)
        of_head = 0.0  # the gradient of the head's weight, which waits until the stage is done
        if stage.part.head:
            of_table = weights if ends.chunk is None else made
            yield from self._head(state, stage, around, of_table)
            of_head = rank.item * ends.table if of_table == "kept" else 0.0
        if rank.sharded and stage.ends.numel and state.had == "backward":  # the ends are gathered again
            begins = self._in_backward(state, stage, around, blocks, blocks, 0.0, head=stage.part.head)
            ends_gathered = rank.ends_gathered(stage) * (2 if rank.shards > 1 else 1)  # with what they arrive in
            waits = around.gathered + around.waiting + self._on_its_way(state, stage, blocks)
            yield begins._replace(buffers=waits + ends_gathered)
        sends = state.is_last or rank.reduces_each
        for at in self._places(blocks, is_even=not sends and not rank.walk.frees_each and not rank.frees_forward):
            is_first = at == blocks - 1 and not stage.part.head
            arriving = 0.0 if is_first else rank.sizes.b
            work = backward_work(rank.sizes, rank.recompute(stage.first + at), weights, is_received=is_first)
            yield self._in_backward(state, stage, around, at, at + 1, arriving + work.peak + of_head)
            is_late = at < min(rank.layout.prefetch, blocks - 1)  # nothing but its own parameters is still to arrive
            if (at == 0 or is_late) and not self._is_gathered(state):
                begins = self._in_backward(state, stage, around, at, at + 1, arriving + of_head)
                yield begins._replace(buffers=begins.buffers + rank.arriving - rank.astray(stage) * (at == 0))
            if rank.sharded and weights == "kept" and (sends or at == 0):
                yield self._block_done(state, stage, around, at, of_head)
        if stage.part.embedding:
            work = embedding_backward(ends, made)
            yield self._in_backward(state, stage, around, -1, 0, rank.sizes.b + work.peak + of_head)
        if rank.sharded and stage.ends.numel:
            of_embedding = 0.0
            if stage.part.embedding and made == "kept":
                is_shared = of_head > 0 and rank.run.shape.tied_embeddings  # and has been added to the head's
                of_embedding = rank.item * ends.table * (not is_shared) + ends.positions
            yield self._ends_done(state, stage, around, of_head + of_embedding)

    def _places(self, blocks: int, *, is_even: bool) -> list[int]:
        """The blocks to look at; `is_even`: at each as much more or less is held than at the one before it."""
        near = self.rank.layout.recompute_every + (0 if is_even else 1)
        first = near if is_even else max(near, self.rank.layout.prefetch + 1)  # from there on fewer are gathered ahead
        return [at for at in range(blocks) if at < first or at >= blocks - near]

    def _head(self, state: State, stage: Stage, around: Around, weights: Weights) -> Iterator[Moment]:
        """The loss, then the head: all of the stage's blocks wait."""
        rank, ends, all_ = self.rank, self.rank.ends, stage.blocks
        if ends.chunk is None:
            loss = self._in_backward(state, stage, around, all_, all_, loss_backward(ends), head=True)
            ahead = 0.0 if self._is_gathered(state) or not stage.blocks else rank.arriving  # only when the head begins
            yield loss._replace(buffers=loss.buffers - ahead)
        has_gradient = rank.whole or (state.has_half and not rank.reduces_each and (rank.alone or rank.item == 4))
        has_total = has_gradient and rank.sum_bytes == 4
        work = head_backward(ends, weights, has_total=has_total)
        yield self._in_backward(state, stage, around, all_, all_, work.peak, head=True)

    def _in_backward(
        self,
        state: State,
        stage: Stage,
        around: Around,
        at: int,
        kept: int,
        temporary: float,
        *,
        head: bool = False,
    ) -> Moment:
        """While block `at` is differentiated (the number of blocks: the head; -1: the embedding), the first `kept`
        blocks of this microbatch being there."""
        rank, part = self.rank, stage.part
        held = rank.kept_by_blocks(stage, kept)
        held += rank.sizes.b * (
            kept == 0 and not head and not part.embedding
        )  # the stage's input, which the runtime still has
        held += part.embedding * (rank.ends.kept_by_embedding + rank.sizes.mask)
        if state.kind is Kind.INPUT and part.layers:  # what the others have left for the second half
            held += (stage.blocks - kept) * rank.put_off_by_block + (not head) * rank.put_off_by_head(stage)
            if rank.walk.keeps_gradients and kept < stage.blocks and not part.head:
                held -= rank.sizes.b  # the gradient that was taken, which waits already
        return Moment(
            self._what(state),
            around.gradients + self._own_gradients(state, stage, around, at),
            around.activations + held + (part.head * rank.ends.kept_by_head if head else 0.0),
            around.logits + (stage.logits if head else 0.0),
            around.gathered + around.waiting + self._gathered_at(state, stage, at) + self._on_its_way(state, stage, at),
            temporary,
        )

    def _block_done(self, state: State, stage: Stage, around: Around, at: int, of_head: float) -> Moment:
        """A block's gradients are widened, or sent, and those of its products go."""
        rank, block = self.rank, self.rank.block
        base = self._in_backward(state, stage, around, at, at, rank.sizes.b + of_head)
        freed = rank.block_gathered if self._frees(state) else 0.0
        if state.is_last or rank.reduces_each:
            is_whole = state.has_gradients and not rank.reduces_each
            new, whole = (0.0, rank.sum_bytes * block.numel) if is_whole else (rank.item * block.numel, 0.0)
            # Its parameters are freed first, and the block's before it is done with what it has sent.
            return base._replace(
                buffers=base.buffers - freed - self._on_its_way(state, stage, at),
                temporary=base.temporary + self._reduced(None, block, new, whole),
            )
        if not state.has_gradients:
            return base._replace(
                buffers=base.buffers - freed,
                temporary=base.temporary + rank.sum_bytes * block.numel + rank.sizes.w_down,
            )
        return base

    def _reduced(self, stage: Stage | None, unit: Unit, new: float, whole: float) -> float:
        """Of a stage's ends, or of a block; each of its parameters is stepped then, where a backward does that."""
        most = self._reducing(unit, new, whole)
        if not self.rank.run.steps_in_backward:
            return most
        layout = self.rank.layout
        rounded_from = layout.reduce_bytes * unit.shard * (layout.reduce_bytes != self.rank.master)
        arrived = self._reducing(unit, min(new, 1.0), whole) - rounded_from
        return max(most, arrived + self.rank.run.step_bytes * self.rank.largest_of(stage))

    def _reducing(self, unit: Unit, new: float, whole: float) -> float:
        """Of a unit's gradients: what is sent, beside it first those that it is made of (`new` ones, and `whole` ones,
        which are counted already), then what arrives, and then the gradient in its own dtype. On one shard, where
        nothing is sent, torch makes a copy between; on several a loop of its own still has the last gradient."""
        rank = self.rank
        sent, arrived = rank.layout.reduce_bytes * unit.padded, rank.layout.reduce_bytes * unit.shard
        copied = sent if rank.shards == 1 else 0.0
        rounded = rank.master * unit.shard * (rank.layout.reduce_bytes != rank.master)
        last = unit.last * (rank.item if new else rank.sum_bytes) if rank.shards > 1 else 0.0
        return sent + max(new, arrived + max(copied, rounded) + last - whole)

    def _ends_done(self, state: State, stage: Stage, around: Around, own: float) -> Moment:
        rank, ends = self.rank, stage.ends
        base = self._in_backward(state, stage, around, -1, 0, 0.0)
        arrived = 0.0 if stage.part.embedding else rank.sizes.b  # the gradient of its input
        freed = rank.ends_gathered(stage) if self._frees(state) else 0.0
        if (state.is_last and state.kind is Kind.BACKWARD) or rank.reduces_each:
            is_whole = state.has_gradients and not rank.reduces_each
            new, whole = (0.0, rank.sum_bytes * ends.numel) if is_whole else (own, 0.0)
            return base._replace(
                buffers=base.buffers - freed - self._on_its_way(state, stage, -1),
                temporary=arrived + self._reduced(stage, ends, new, whole),
            )
        if not state.has_half and rank.sum_bytes != rank.item:
            own = rank.widened(stage, is_split=state.kind is Kind.INPUT)
        return base._replace(buffers=base.buffers - freed, temporary=arrived + own)

    def _own_gradients(self, state: State, stage: Stage, around: Around, at: int) -> float:
        """Whole or reduced ones of the stage, block `at` being at work."""
        rank, block = self.rank, self.rank.block
        later = max(stage.blocks - 1 - at, 0)  # blocks that are done
        if rank.whole or state.kind is Kind.INPUT:
            return around.own_gradients
        if rank.alone:
            return around.own_gradients + (0.0 if state.has_gradients else rank.master * block.numel * later)
        reduced = (rank.master + rank.summed_bytes) * block.shard * later
        if rank.reduces_each:
            partial = rank.partial_bytes * block.shard * later
            waits = around.own_gradients - rank.sent_last(stage)  # what was sent is counted as on its way
            if not state.is_last:
                return waits if state.has_gradients else partial
            return waits - partial + reduced if state.has_gradients else reduced
        if state.is_last:
            reduced *= not rank.run.steps_in_backward
            return around.own_gradients - state.has_gradients * rank.sum_bytes * block.numel * later + reduced
        return around.own_gradients + (0.0 if state.has_gradients else rank.sum_bytes * block.numel * later)

    def _on_its_way(self, state: State, stage: Stage, at: int) -> float:
        """What the block before (in the order of a backward) has sent, until the next one sends; before the first, what
        the last backward has sent."""
        rank = self.rank
        sends = rank.sharded and state.kind is Kind.BACKWARD and (state.is_last or rank.reduces_each)
        if at < stage.blocks - 1:
            return rank.layout.reduce_bytes * rank.block.padded if sends else 0.0
        return rank.sent_last(stage) if state.has_gradients else 0.0

    def _frees(self, state: State) -> bool:
        """Whether this backward frees parameters as it goes."""
        rank = self.rank
        return rank.sharded and (rank.walk.frees_each or (state.is_last and state.kind is Kind.BACKWARD))

    def _is_gathered(self, state: State) -> bool:
        """Whether the stage's blocks are when a backward begins."""
        return not self.rank.sharded or (state.had == "forward" and not self.rank.frees_forward)

    def _gathered_at(self, state: State, stage: Stage, at: int) -> float:
        """Of the stage, block `at` being at work."""
        rank = self.rank
        if not rank.sharded:
            return 0.0
        ends, block = rank.ends_gathered(stage), rank.block_gathered
        is_gathered = self._is_gathered(state)
        if is_gathered and not self._frees(state):
            return ends + stage.blocks * block
        if is_gathered:
            astray = rank.astray(stage) if at == 0 and not state.is_last else 0.0
            return ends + min(at + 1, stage.blocks) * block + astray
        if at == stage.blocks:  # the head, with the last block ahead, unless head and loss are one
            return ends + (rank.arriving if stage.blocks and rank.ends.chunk is None else 0.0)
        here = block if at >= 0 else 0.0
        return ends + here + (rank.arriving * min(rank.layout.prefetch, at) if at > 0 else rank.astray(stage))

    # The last backward where gradients are sent whole.

    def _sending(self, state: State, stage: Stage, around: Around) -> Iterator[Moment]:
        """Buckets of whole gradients."""
        rank = self.rank
        if rank.layout.dp == 1:
            return
        splits = state.kind is Kind.WEIGHT
        buckets = sent_by(rank.run, stage.part)
        of_embedding = stage.part.embedding * (rank.ends.kept_by_embedding + rank.sizes.mask)
        for sent in buckets[:-1] if stage.part.embedding else buckets:
            at = sent.before - 1
            at_work = 0.0
            if at >= 0 and not splits:
                weights = rank.weights(has_gradients=True)
                at_work = rank.sizes.b + backward_work(rank.sizes, rank.recompute(stage.first + at), weights).peak
            arrived = 0.0 if splits else rank.sizes.b
            yield Moment(
                "last backward",
                around.gradients,
                around.activations + (0.0 if splits else rank.kept_by_blocks(stage, sent.before) + of_embedding),
                around.logits,
                around.waiting,
                max(sent.bytes + at_work, sent.packing + arrived),
            )

    def at_the_end(self) -> Iterator[Moment]:
        """The bucket with what no block holds is sent when all is done."""
        rank = self.rank
        for stage in rank.stages if rank.whole and rank.layout.dp > 1 else ():
            if stage.part.embedding:
                last = sent_by(rank.run, stage.part)[-1]
                sent = max(last.bytes, last.packing)
                others = sum(self._sent[rank.kinds.index(each)] for each in rank.stages if each is not stage)
                received = received_into(rank.walk) * rank.sizes.b
                yield Moment("last backward", 0.0, self.rank.throughout, 0.0, received, others + sent)

    # The second half of a backward.

    def _second_half(self, state: State, stage: Stage, around: Around) -> Iterator[Moment]:
        rank = self.rank
        weights = rank.weights(has_gradients=state.has_gradients)
        gathered = {"nothing": 0.0, "forward": rank.gathered_by_forward(stage), "backward": rank.astray(stage)}
        held = Moment(
            self._what(state),
            around.gradients + around.own_gradients,
            around.activations,
            around.logits,
            around.gathered + around.waiting + gathered[state.had],
            0.0,
        )
        table = rank.item * rank.put_off_table(stage)
        yield held._replace(temporary=0.0 if weights == "in place" else table)
        made, each = (table, rank.sizes.products) if weights == "kept" else (0.0, 0.0)
        peak, left = weights_work(rank.sizes, weights).peak, around.activations - rank.put_off_by_head(stage)
        # What the gradient was received into stays.
        received = rank.sizes.b if rank.walk.keeps_gradients and not stage.part.head else 0
        for done in (0, stage.blocks - 1) if stage.blocks else ():
            waits = left - done * rank.put_off_by_block + received * (done > 0)
            yield held._replace(activations=waits, temporary=made + done * each + peak)
        used_up = around.activations - stage.put_off + received
        if rank.whole and state.is_last:
            yield from self._sending(state, stage, around._replace(activations=used_up))
        if not rank.sharded:
            return
        after = held._replace(activations=used_up)
        whole = around.gradients + rank.sum_bytes * (stage.blocks * rank.block.numel + stage.ends.numel)
        if not state.has_gradients and rank.sum_bytes != rank.item:  # the head's is widened first
            narrow = (rank.sum_bytes - rank.item) * stage.blocks * rank.sizes.products / rank.item
            last = rank.sizes.w_down if stage.blocks else 0.0
            yield after._replace(gradients=whole, temporary=max(last, table - narrow))
        if state.is_last:
            unit = rank.block if stage.blocks else stage.ends  # which is freed first, where it is gathered
            freed = rank.block_gathered if stage.blocks else rank.ends_gathered(stage)
            freed *= self._is_gathered(state)
            reducing = self._reducing(unit, 0.0, rank.sum_bytes * unit.numel)
            yield after._replace(gradients=whole, buffers=after.buffers - freed, temporary=reducing)
            unit = stage.ends if stage.ends.numel else rank.block  # the last of them
            own = rank.sum_bytes * unit.numel
            reduced = (rank.master + rank.summed_bytes) * (rank.shard_of(stage) - unit.shard)
            reducing = self._reducing(unit, 0.0, own)
            buffers = around.gathered + around.waiting
            yield after._replace(gradients=around.gradients + own + reduced, buffers=buffers, temporary=reducing)

    def _what(self, state: State) -> What:
        if state.is_last:
            return "last backward"
        return "backward" if state.has_gradients else "first backward"

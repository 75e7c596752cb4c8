"""The named moments of a step at which a rank of a parallel3d run may hold most, each a sum of
bytes by kind.

    forward            the last block of a stage's forward, when most forwards are alive
    loss               the loss, of the stage that has it
    first backward     a block of a backward that makes a stage's gradients, with the block's recompute
    backward           a block of one that adds to them, or the second half of a split backward
    last backward      a block of the one that completes them, which reduces them over the data ranks
    optimizer's step   what the optimizer makes for itself

An action goes through its stage's blocks one after the other, and what it holds grows or shrinks by
the same from one to the next, so that the first and the last ones are enough.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import mul
from typing import Literal, NamedTuple

from parallel3d.planner.memory.block_work import WeightGradients
from parallel3d.planner.memory.buckets import buckets_of
from parallel3d.planner.memory.rank_schedule import BeforeAction, grouped_moments
from parallel3d.planner.memory.rank_state import NO_UNIT, RankStage, RankState
from parallel3d.schedules.schedule import Kind

Moment = Literal[
    "forward", "loss", "first backward", "backward", "last backward", "optimizer's step"
]


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
        buffers: float = 0.0,
        temporary: float = 0.0,
    ) -> MemorySnapshot:
        """Returns the same moment with more bytes, or fewer."""
        work = self[4] + buffers, self[5] + temporary
        return MemorySnapshot(self[0], self[1] + gradients, self[2] + activations, self[3], *work)


def moments(rank: RankState) -> Iterator[MemorySnapshot]:
    """All moments of a rank. Of those that differ in what other stages hold alone the fullest is
    enough."""
    layout = rank.layout
    local = rank.block.hidden_local
    pipeline = (layout.pp, rank.rank, layout.microbatches, layout.virtual_stages)
    groups, received = grouped_moments(layout.schedule, *pipeline, frees_each=rank.frees_each)
    published = sum(stage.published for stage in rank.stages)
    # Bytes of each kind that the numbers of all stages count, and of all kinds together.
    by_stage = zip(*(stage.by_progress for stage in rank.stages), strict=True)
    by_kind = [[*chain(*parts)] for parts in by_stage]
    held = [sum(kinds) for kinds in zip(*by_kind, strict=True)]
    for group in groups:
        action = max(group, key=lambda one: _bytes(one.stages, held) + one.in_flight * local)
        gradients, activations, logits, buffers = (_bytes(action.stages, kind) for kind in by_kind)
        buffers += published + action.in_flight * local
        others = activations + rank.throughout, logits, buffers
        stage = rank.stages[action.stage]
        before = MemorySnapshot(_moment(action), gradients, *others)
        if action.kind is Kind.FORWARD:
            yield from _forward(rank, action, stage, before)
        elif action.kind is Kind.WEIGHT:
            yield from _second_half(rank, action, stage, before)
        else:
            yield from _backward(rank, action, stage, before)
        if action.is_last and rank.whole and rank.layout.dp > 1:
            yield from _sending(rank, action, stage, before)
    yield from _at_the_end(rank, received * local)


def _bytes(counts: Iterable[float], each: Iterable[float]) -> float:
    return sum(map(mul, counts, each))


def _moment(action: BeforeAction) -> Moment:
    if action.kind is Kind.FORWARD:
        return "forward"
    if action.is_last:
        return "last backward"
    return "backward" if action.own.whole else "first backward"


def _forward(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """Yields a forward: the embedding, the last block, the head. Parameters that are gathered
    arrive beside those that are in use, and stay until the next ones are there."""
    last = max(stage.blocks - 1, 0)
    own = action.own
    split = rank.shards > 1
    is_gathering = rank.sharded and (not own.gathered or rank.frees_forward)
    arriving = rank.arriving * is_gathering
    embedded = stage.part.embedding * rank.ends.kept_by_embedding
    gathered = stage.gathered * (1 - own.gathered)
    head = rank.item * stage.head.padded * rank.sharded
    rest = rank.item * stage.rest.padded * is_gathering
    head_arrives = head * (1 - own.gathered)
    published = stage.published * (1 - own.gathered)
    if rest and not (stage.is_tied and own.gathered):
        yield before.plus(
            buffers=rest * (1 + split) + arriving * (stage.blocks > 0),
            temporary=stage.part.embedding * rank.block.hidden_full,
        )
    yield before.plus(
        activations=rank.kept_by_blocks(stage.first, last) + embedded,
        buffers=gathered
        - head_arrives
        + rank.block_gathered * rank.frees_forward
        + arriving
        - published,
        temporary=max(
            rank.block.kept + rank.block.forward(is_recomputed=rank.recomputes),
            arriving * (last > 0),
        ),
    )
    if head_arrives:
        yield before.plus(
            activations=stage.kept,
            buffers=gathered + head_arrives * split,
            temporary=max(stage.logits, arriving),
        )


def _backward(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """Yields a backward, or the first half of a split one: the loss and the head, blocks, the
    embedding."""
    ends = rank.ends
    block = rank.block
    unit = rank.block_unit
    own = action.own
    blocks = stage.blocks
    is_half = action.kind is Kind.INPUT
    has_whole = bool(own.whole)
    has_some = bool(own.whole or own.halves)
    weights: WeightGradients = "later" if is_half else rank.weights(has_gradients=has_whole)
    made = rank.weights(has_gradients=has_some)  # the weights that no second half waits for
    reduces = rank.sharded and not is_half and (action.is_last or rank.reduces_each)
    frees = rank.sharded and (rank.frees_each or (action.is_last and not is_half))
    is_gathered = bool(own.gathered) and not rank.frees_forward
    head_gathered, rest_gathered = (
        rank.item * each.padded * rank.sharded for each in (stage.head, stage.rest)
    )
    # The gradient of an embedding does not need its values, but fully_shard gathers what a backward
    # has freed.
    gathered_again = rest_gathered * (
        not own.gathered and not rank.frees_forward and not stage.is_tied
    )
    rest_gathered *= is_gathered or stage.is_tied
    gathered_before = own.gathered * stage.gathered
    sent_before = rank.sent(stage.last_reduced) * (rank.reduces_each and has_whole)
    if own.freed and stage.needed_by_loss:  # they are gathered again
        yield before.plus(buffers=stage.needed_by_loss * (2 if rank.shards > 1 else 1))

    table = 0  # the gradient of the head's weight, which waits until its unit is done
    if stage.part.head:
        of_table = weights if ends.chunk is None else made
        table = rank.item * ends.table * (of_table == "kept")
        adds = has_some and not rank.reduces_each and (rank.alone or rank.item == 4)
        work = ends.head_backward(of_table, has_sum=(rank.whole or adds) and rank.sum_bytes == 4)
        head = before.plus(buffers=0 if is_gathered else stage.needed_by_loss - gathered_before)
        yield head.plus(temporary=ends.loss)._replace(moment="loss")
        yield head.plus(temporary=work + rank.arriving * (not is_gathered and blocks > 0))

    before = before._replace(logits=before.logits - stage.logits)
    # The head's unit, blocks, and the embedding (-1) with what goes with it.
    places = {blocks, blocks - 1, max(blocks - 2, 0), min(rank.layout.prefetch, blocks - 1), 0, -1}
    for at in places if stage.head.numel else places - {blocks}:
        later = blocks - 1 - at  # blocks that are done
        is_head = at == blocks and stage.head.numel > 0
        current = stage.head if is_head else unit if at >= 0 else stage.rest
        in_use = head_gathered if is_head else rank.block_gathered if at >= 0 else rest_gathered
        gathered = float(rest_gathered + head_gathered * (is_head or not frees))
        freed = in_use * frees
        if is_gathered:
            gathered += rank.block_gathered * (min(at + 1, blocks) if frees else blocks)
        elif is_head:
            gathered += rank.arriving * (blocks > 0)
        elif at >= 0:
            gathered += rank.block_gathered + rank.arriving * min(rank.layout.prefetch, at)
        elif at < 0:
            gathered += gathered_again
        if at == 0 and rank.shards > 1:
            gathered += gathered_again  # is on its way
        waiting = table * (not stage.head.numel)
        sent = sent_before
        if reduces and not is_head and (later > 0 or stage.head.numel):
            sent = rank.sent(unit if later > 0 else stage.head)
        done = 0.0  # the most while the gradients of the unit are reduced or widened
        if reduces:
            done = (
                rank.reducing(current, is_whole=has_whole and not rank.reduces_each) - sent - freed
            )
        elif rank.sharded and 0 <= at < blocks and not (has_whole or is_half):
            done = rank.sum_bytes * unit.numel + block.down_weight - freed
        elif rank.sharded and (at < 0 or is_head) and not has_some:
            largest = rank.item * min(current.numel, ends.table) * (rank.sum_bytes != rank.item)
            delayed_table = ends.delayed_table * (
                is_half and stage.part.head and (is_head or stage.is_tied)
            )
            done = rank.sum_bytes * (current.numel - delayed_table) + largest - freed
        if is_head:
            work = table
            done = done - block.hidden_local
        elif at >= 0:
            arriving = rank.arriving * (not is_gathered)
            work = block.kept + max(
                block.backward(weights, is_recomputed=rank.recomputes), arriving
            )
        else:
            arriving = gathered_again * (rank.shards > 1)
            work = max(ends.embedding_backward(made) * stage.part.embedding, arriving)
            # which are among them, and used up
            done -= waiting + block.hidden_local * stage.part.embedding
        kept = (
            rank.kept_by_blocks(stage.first, max(at, 0))
            + stage.part.embedding * ends.kept_by_embedding
        )
        delayed = (max(later, 0) * block.delayed + stage.part.head * ends.delayed) * is_half
        yield before.plus(
            gradients=_growth(rank, action, stage, later),
            activations=kept + delayed - stage.kept,
            buffers=(gathered - gathered_before) * rank.sharded + sent - sent_before,
            temporary=block.hidden_local + waiting + max(work, done),
        )


def _growth(rank: RankState, action: BeforeAction, stage: RankStage, later: int) -> float:
    """What a backward has added to the stage's gradients when so many of its blocks are done, and
    before them the head, where it is a unit; -1 block: the head is not done either."""
    if rank.whole:
        return 0.0
    is_half = action.kind is Kind.INPUT
    blocks = max(later, 0)
    head = stage.head if later >= 0 else NO_UNIT
    if is_half:
        is_new = not (action.own.whole or action.own.halves)
        return rank.sum_bytes * max(head.numel - rank.ends.delayed_table, 0) * is_new
    numel = rank.block_unit.numel * blocks + head.numel
    shard = rank.block_unit.shard * blocks + head.shard
    unreduced = rank.partial_bytes * shard if rank.reduces_each else rank.sum_bytes * numel
    if not action.is_last or not rank.sharded:
        return 0.0 if action.own.whole else unreduced
    reduced = rank.reduced_bytes * shard
    return reduced - unreduced * action.own.whole


def _second_half(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """The second half of a split backward: the products' gradients are made, and then widened or
    reduced."""
    own = action.own
    unit = rank.block_unit
    blocks = stage.blocks
    table = rank.item * rank.ends.delayed_table * stage.part.head
    if blocks:
        is_kept = rank.weights(has_gradients=bool(own.whole)) == "kept"
        made = rank.block.products if is_kept else rank.block.up_weights
        made_at_last = made * (blocks if is_kept else 1)
        one_left = rank.block.delayed - stage.delayed
        yield before.plus(temporary=table + made)
        yield before.plus(activations=one_left, temporary=table + made_at_last)
    gradients = stage.whole_gradients * (1 - own.whole) - own.halves * stage.half_gradients
    after = before.plus(gradients=gradients, activations=rank.block.hidden_local - stage.delayed)
    # the head is reduced, then blocks, one after the other, and then the rest
    if rank.sharded and action.is_last:
        shrinks = rank.sum_bytes * unit.numel - rank.reduced_bytes * unit.shard
        head_shrinks = rank.sum_bytes * stage.head.numel - rank.reduced_bytes * stage.head.shard
        sent = rank.reducing(unit, is_whole=True) - head_shrinks
        sent = max(sent, sent - (blocks - 1) * shrinks) if blocks else 0.0
        rest_sent = rank.reducing(stage.rest, is_whole=True) - head_shrinks - blocks * shrinks
        head_sent = rank.reducing(stage.head, is_whole=True)
        first = stage.head if stage.head.numel else unit
        freed = rank.item * first.padded * (bool(own.gathered) and not rank.frees_forward)
        yield after.plus(buffers=-freed, temporary=max(sent, rest_sent, head_sent))
    else:
        yield after.plus(
            temporary=max(table, rank.block.down_weight) * (rank.sharded and not own.whole)
        )


def _sending(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """Yields the last backward of a stage, bucket of whole gradients after bucket."""
    is_half = action.kind is Kind.WEIGHT
    local = rank.block.hidden_local
    sent_before = 0.0
    if not is_half:
        before = before._replace(logits=before.logits - stage.logits)
    for bucket in buckets_of(rank.run, stage.part):
        activations = -stage.delayed
        work = 0.0
        if not is_half:
            kept = rank.kept_by_blocks(stage.first, bucket.before)
            activations = kept + stage.part.embedding * rank.ends.kept_by_embedding - stage.kept
            if bucket.before:
                recomputed = (
                    rank.block.kept - kept + rank.kept_by_blocks(stage.first, bucket.before - 1)
                )
                work = (
                    local
                    + recomputed
                    + rank.block.backward("dropped", is_recomputed=rank.recomputes)
                )
        sent = max(bucket.copied + work, bucket.packing + local * (not is_half))
        yield before.plus(activations=activations, temporary=sent_before + sent)
        sent_before = bucket.copied


def _at_the_end(rank: RankState, received: float) -> Iterator[MemorySnapshot]:
    """Yields the last buckets of all stages, and the optimizer's step."""
    step = rank.step_bytes
    if rank.whole:
        sent = [stage.under_way for stage in rank.stages]
        packing = max(buckets_of(rank.run, stage.part)[-1].packing for stage in rank.stages)
        in_buckets = sum(sent) + max(0.0, packing - min(sent)) if rank.layout.dp > 1 else 0.0
        yield MemorySnapshot(
            "last backward",
            0.0,
            rank.throughout,
            0.0,
            received + rank.block.hidden_local,
            in_buckets,
        )
        step = max(step, sum(stage.published for stage in rank.stages))
    gradients = sum(stage.reduced_gradients for stage in rank.stages)
    yield MemorySnapshot("optimizer's step", gradients, rank.throughout, 0.0, received, step)

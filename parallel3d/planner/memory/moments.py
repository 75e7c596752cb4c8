"""The named moments of a step at which a rank of a parallel3d run may hold most, each a sum of
bytes by kind, on the safe side.

    forward            the last block of a stage's forward, or its head
    loss               the loss, of the stage that has it
    first backward     the first or the last block of a backward that makes a stage's gradients
    backward           a block of one that adds to them, or the second half of a split backward
    last backward      a block of the one that completes them, which reduces them over the data ranks
    optimizer's step   what the optimizer makes for itself
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import mul
from typing import Literal, NamedTuple

from parallel3d.planner.memory.block_work import WeightGradients
from parallel3d.planner.memory.rank_schedule import BeforeAction, moments_of_schedule
from parallel3d.planner.memory.rank_state import NO_UNIT, RankStage, RankState, Unit
from parallel3d.schedules.registry import schedule_traits
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

    def plus(self, **more: float) -> MemorySnapshot:
        """Returns the same moment with more bytes of some kinds, or fewer."""
        changed = {kind: getattr(self, kind) + bytes_ for kind, bytes_ in more.items()}
        return self._replace(**changed)


def moments(rank: RankState) -> Iterator[MemorySnapshot]:
    """All moments of a rank. Of those that differ in what other stages hold alone the fullest is
    enough."""
    layout = rank.layout
    pipeline = (layout.pp, rank.rank, layout.microbatches, layout.virtual_stages)
    groups, count = moments_of_schedule(layout.schedule, *pipeline, frees_each=rank.frees_each)
    in_flight = float(count * rank.block.hidden_local)
    if schedule_traits(layout.schedule).splits_backward and len(rank.stages) > 1:
        in_flight += rank.sending_bytes  # stages end long before the last one does
    # Bytes of each kind that the numbers of all stages count, and of all kinds together.
    by_stage = zip(*(stage.by_progress for stage in rank.stages), strict=True)
    by_kind = [[*chain(*parts)] for parts in by_stage]
    held = [sum(kinds) for kinds in zip(*by_kind, strict=True)]
    for group in groups:
        action = max(group, key=lambda one: _bytes(one.counts, held))
        gradients, activations, logits, buffers = (_bytes(action.counts, kind) for kind in by_kind)
        stage = rank.stages[action.stage]
        before = MemorySnapshot(
            _moment(action),
            gradients,
            activations + rank.throughout,
            logits,
            buffers + in_flight,
        )
        if action.kind is Kind.FORWARD:
            yield from _forward(rank, action, stage, before)
        elif action.kind is Kind.WEIGHT:
            yield from _second_half(rank, action, stage, before)
        else:
            yield from _backward(rank, action, stage, before)
    gradients = sum(stage.reduced_gradients for stage in rank.stages)
    at_last = MemorySnapshot("optimizer's step", gradients, rank.throughout, 0.0, in_flight)
    yield at_last.plus(temporary=rank.step_bytes)
    yield at_last.plus(temporary=rank.sending_bytes)


def _bytes(counts: Iterable[float], each: Iterable[float]) -> float:
    return sum(map(mul, counts, each))


def _moment(action: BeforeAction) -> Moment:
    if action.kind is Kind.FORWARD:
        return "forward"
    if action.is_last:
        return "last backward"
    if action.has_gradients:
        return "backward"
    return "first backward"


def _forward(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """Yields a forward: the embedding, the last block, the head. Parameters that are gathered
    arrive beside those that are in use."""
    last = max(stage.blocks - 1, 0)
    gathers = rank.sharded and (not action.is_gathered or rank.frees_forward)
    arriving = rank.arriving * gathers
    gathered = stage.gathered * (1 - action.is_gathered) + arriving
    rest = rank.item * stage.rest.padded * gathers
    if rest:
        yield before.plus(buffers=2 * rest + arriving, temporary=rank.block.hidden_full)
    kept = rank.kept_by_blocks(stage.first, last)
    if stage.part.embedding:
        kept += rank.ends.kept_by_embedding
    work = rank.block.kept + rank.block.forward(is_recomputed=rank.recomputes)
    yield before.plus(
        activations=kept,
        buffers=gathered + rank.block_gathered * rank.frees_forward,
        temporary=max(work, arriving * (last > 0)),
    )
    if stage.part.head:
        yield before.plus(activations=stage.kept, buffers=gathered, temporary=stage.logits)


def _backward(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """Yields a backward, or the first half of a split one: the loss, then the head, the first and
    the last block and the embedding, each with its gradients reduced or added up."""
    ends = rank.ends
    block = rank.block
    blocks = stage.blocks
    has_some = action.has_gradients
    is_half = action.kind is Kind.INPUT
    weights: WeightGradients = "later" if is_half else rank.weights(has_gradients=has_some)
    reduces = rank.sharded and not is_half and (action.is_last or rank.reduces_each)
    frees = rank.sharded and (rank.frees_each or (action.is_last and not is_half))
    is_gathered = action.is_gathered and not rank.frees_forward
    # an embedding, and a head in chunks, leave nothing to a second half
    of_ends = rank.weights(has_gradients=has_some)
    arriving = 0 if is_gathered or not blocks else rank.arriving
    table = 0  # the gradient of the head's weight, which waits until its unit is done
    if stage.part.head:
        of_head = weights if ends.chunk is None else of_ends
        table = rank.item * ends.table * (of_head == "kept")
        adds = has_some and not rank.reduces_each and (rank.alone or rank.item == 4)
        has_sum = rank.sum_bytes == 4 and (rank.whole or adds)
        made = ends.head_backward(of_head, has_sum=has_sum)
        gathered = stage.needed_by_loss * (not action.is_gathered)
        loss = before.plus(buffers=gathered, temporary=max(ends.loss, made + arriving))
        yield loss._replace(moment="loss")
    before = before._replace(logits=before.logits - stage.logits)
    last = blocks - 1
    places = [(stage.head, blocks)]
    for at in {last, max(last - 1, 0), min(1, last), 0}:
        places.append((rank.block_unit, at))
    places.append((stage.rest, -1))
    for unit, at in places:
        if not unit.numel:
            continue
        in_use = rank.item * unit.padded * rank.sharded
        later = max(blocks - 1 - at, 0)  # blocks that are done
        freed = 0.0  # what was gathered before
        if frees and at < blocks:
            freed = later * rank.block_gathered * is_gathered
            freed += stage.needed_by_loss * action.is_gathered
        gathered = 0.0
        if not is_gathered and at < blocks:
            gathered = in_use + arriving * min(rank.layout.prefetch, max(at, 0))
            if stage.is_tied or at == 0:
                gathered += rank.item * stage.rest.padded * rank.sharded
        sent = 0  # gradients of the unit before that are on their way
        done = 0.0  # the most while the gradients of the unit are reduced or widened
        if reduces:
            done = rank.reducing(unit, is_whole=has_some and not rank.reduces_each) - in_use * frees
            before_it = rank.block_unit if later else stage.head
            sent = rank.layout.reduce_bytes * before_it.padded * (at < blocks)
        elif rank.sharded and not has_some and not (is_half and 0 <= at < blocks):
            largest = min(unit.numel, ends.table)
            if 0 <= at < blocks:
                largest = unit.last
            done = rank.sum_bytes * unit.numel + rank.item * largest
        if at == blocks:
            work: float = table
        elif at >= 0:
            made = block.backward(weights, is_recomputed=rank.recomputes)
            work = block.kept + max(made, arriving)
        else:
            work = ends.embedding_backward(of_ends) * stage.part.embedding
        kept = rank.kept_by_blocks(stage.first, max(at, 0))
        kept += stage.part.embedding * ends.kept_by_embedding
        delayed = (later * block.delayed + stage.part.head * ends.delayed) * is_half
        head = stage.head if at < blocks else NO_UNIT
        if action.is_last and (later or len(rank.stages) > 1):
            done += rank.sending_bytes
            work += rank.sending_bytes
        yield before.plus(
            gradients=_growth(rank, action, later, head),
            activations=kept + delayed - stage.kept,
            buffers=gathered - freed + sent,
            temporary=block.hidden_local + table * (not stage.head.numel) + max(work, done),
        )


def _growth(rank: RankState, action: BeforeAction, blocks: int, head: Unit) -> float:
    """What a backward has added to the stage's gradients when so many of its blocks, and before
    them the head, are done."""
    if rank.whole or action.kind is Kind.INPUT:
        return 0.0
    numel = rank.block_unit.numel * blocks + head.numel
    shard = rank.block_unit.shard * blocks + head.shard
    unreduced = rank.sum_bytes * numel
    if rank.reduces_each:
        unreduced = rank.partial_bytes * shard
    added = unreduced
    if action.is_last and rank.sharded:
        added = rank.reduced_bytes * shard
    return added - unreduced * action.has_gradients


def _second_half(
    rank: RankState, action: BeforeAction, stage: RankStage, before: MemorySnapshot
) -> Iterator[MemorySnapshot]:
    """The second half of a split backward: the products' gradients are made, and then widened or
    reduced."""
    unit = rank.block_unit
    table = rank.item * rank.ends.delayed_table * stage.part.head
    is_kept = rank.weights(has_gradients=action.has_gradients) == "kept"
    made = rank.block.up_weights
    made_at_last = made
    if is_kept:
        made = rank.block.products
        made_at_last = made * stage.blocks
    yield before.plus(temporary=table + made)
    yield before.plus(
        activations=rank.block.delayed - stage.delayed, temporary=table + made_at_last
    )
    after = before.plus(
        gradients=stage.whole_gradients * (1 - action.has_gradients),
        activations=rank.block.hidden_local - stage.delayed,
    )
    sent = 0.0
    if rank.sharded and action.is_last:
        sent = max(rank.reducing(each, is_whole=True) for each in (unit, stage.head))
    yield after.plus(temporary=max(sent, table, rank.block.down_weight))

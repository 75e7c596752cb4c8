"""Memory that a backward pass adds and frees, in the order of the engine.

Each step is the bytes that it needs only while it runs, and those that it leaves. The engine is
`pipeline.execution` for the halves of a backward pass, `sharding.replicated` for buckets, and
`fully_shard` for sharded parameters: before a block it copies out the parameters that it has
all-gathered in advance, and starts the next all-gather. After a block it frees parameters, frees
the buffer of the previous reduction, and copies gradients into the buffer of the next one, which
stays until the next block. Gradients of layers of parallel3d are added to existing ones in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel3d.planner.memory.live import Backward
from parallel3d.planner.memory.states import RankStates, Unit
from parallel3d.planner.memory.temporaries import MicrobatchBytes
from parallel3d.schedules.schedule import Kind

Steps = Iterator[tuple[float, float]]


class BackwardWalk:
    """Steps of a backward pass of a stage.

    `first` is the highest sum of the first steps, relative to the memory before the pass. `last` is
    that of the last steps, relative to the memory after it. A weight-gradient half has no `last`.
    `dense` is the memory of blocks without experts. `each` holds the bytes that the numbers in the
    stage's state count.
    """

    def __init__(
        self,
        states: RankStates,
        backward: Backward,
        microbatch: MicrobatchBytes,
        dense: MicrobatchBytes,
        each: Sequence[float],
    ) -> None:
        at = backward.stage
        self.states = states
        self.backward = backward
        self.microbatch = microbatch
        self.dense = dense
        self.each = each
        self.part = part = states.parts[at]
        self.unit = states.units[at]
        self.end = states.ends[at]
        self.is_half = backward.kind is Kind.INPUT
        self.is_tied = part.embedding and part.head and states.run.shape.tied_embeddings
        is_foreign = states.run.shape.saved is not None
        # Bytes per parameter of gradients that torch makes in the first backward pass.
        is_late = is_foreign and not states.is_sharded and not backward.has_gradients
        self.late = states.master if is_late and states.item == states.master else 0
        # Parameters and gradients in the compute dtype are temporary only if they are sharded. Only
        # our layers fuse gradients, so that none are made.
        self.item = states.item * states.is_sharded
        self.adds = bool(backward.has_gradients) and not states.reduces_each
        is_fused = self.adds and not is_foreign and states.item >= states.summed
        self.made = 0 if is_fused else self.item
        self.frees_each = states.layout.gather_cadence == "microbatch"
        self.reduces = backward.is_last or states.reduces_each
        before = backward.before[at]
        self.is_gathered = before.is_gathered if self.frees_each else before.is_used
        self.sent = 0.0  # Bytes of the buffer in reduction.
        if states.reduces_each and backward.has_gradients:
            last = states.block if part.layers and not part.embedding else self.end
            self.sent = states.reduce * last.padded
        # Parameters are all-gathered again, one block ahead.
        self.gathers = 0 if self.is_gathered and not states.frees_forward else self.item
        self.passed = 0  # Parameters whose gradients are complete.
        if backward.kind is Kind.WEIGHT:
            self.first, _ = _highest(self._weights())
            return
        self.first, _ = _highest(self._from_the_loss())
        self.sent = 0.0
        self.passed = self.unit.numel - self.end.numel * part.embedding
        self.passed -= min(2, part.layers) * (states.block.numel + states.experts.numel)
        most, total = _highest(self._to_the_embedding())
        self.last = max(most, 0.0) - total

    def _from_the_loss(self) -> Steps:
        """Loss, head and the last blocks."""
        states = self.states
        microbatch = self.microbatch
        layers = self.part.layers
        late = -self.late * self.unit.numel
        yield late, late  # Gradients that do not exist yet
        if layers and self.is_gathered:
            _, kept = self._block_bytes(layers - 1)
            ahead = self.item * states.block.padded
            work = max(microbatch.saved + microbatch.forward, ahead) - kept
            work -= microbatch.saved_by_head * self.part.head  # It runs afterwards.
            yield ahead + self.item * states.experts.padded + work, 0  # Last block's forward pass
        yield 0, self.gathers * states.block.padded  # All-gather of the last block
        if self.part.head:
            if not self.is_gathered:
                yield 0, self.item * self.end.padded  # All-gathered head
            work = max(microbatch.loss, microbatch.input_gradient + self.made * self.end.numel)
            yield work, -microbatch.saved_by_head * (not self.is_half)  # Loss
            if self.is_tied:
                yield 0, self.made * self.end.numel  # Gradient of the head
            else:
                yield from self._gradients(self.end)
        count = 2
        if states.buckets[self.backward.stage]:  # Until two buckets are full.
            count += 2 * states.bucket // states.block.numel
        for index in reversed(range(max(layers - count, 0), layers)):
            yield from self._block(index)

    def _to_the_embedding(self) -> Steps:
        """The first two blocks and the embedding."""
        states = self.states
        for index in reversed(range(min(2, self.part.layers))):
            yield from self._block(index)
        if self.part.embedding:
            work = self.microbatch.embedding + self.made * self.end.numel
            yield work, 0  # Gradients of rows that tokens select, and a table of zeros
            yield from self._gradients(self.end, is_gathered=not states.frees_forward)
        if self.backward.is_last and states.is_sharded:
            yield 0, -self.sent  # End of the last reduction

    def _block_bytes(self, index: int) -> tuple[MicrobatchBytes, int]:
        """Returns the memory of a block, and the bytes that it keeps for its backward pass."""
        each = self.microbatch if index >= self.part.dense else self.dense
        _, first = self.states.stages[self.backward.stage]
        is_recomputed = (first + index) % self.states.layout.recompute_every == 0
        return each, each.kept if is_recomputed else each.saved

    def _block(self, index: int) -> Steps:
        states = self.states
        block = states.block
        each, kept = self._block_bytes(index)
        experts = Unit(0, 0, 0) if index < self.part.dense else states.experts
        yield 0, self.gathers * (block.padded + experts.padded)  # Parameters
        if kept < each.saved:
            # With the output, its gradient, and the output of the next block, which is freed late.
            work = each.again + each.forward + 3 * each.hidden
            yield each.saved - kept + work, each.saved - kept  # Recomputation
        if experts.numel:
            yield each.experts[self.is_half], 0  # Operators of the experts
            yield from self._gradients(experts)
        yield each.operators[self.is_half], each.halved * self.is_half - each.saved  # Operators
        yield from self._gradients(block)

    def _gradients(self, unit: Unit, *, is_gathered: bool = True) -> Steps:
        """The end of a unit's backward pass."""
        is_end = unit is self.end
        freed = self.item * unit.padded
        if not is_gathered or not (self.backward.is_last or self.frees_each):
            freed = 0
        if self.is_half and not is_end:
            yield 0, -freed  # Parameters
            return
        made = self.made * unit.numel
        total = self.states.summed * unit.numel * self.states.is_sharded
        yield 0, made + self.late * unit.numel  # Gradients
        made *= 1 + (is_end and self.is_tied)
        if self.adds:
            yield 0, -made  # Added to those of earlier microbatches
            made = total
        yield 0, -freed  # Parameters
        if self.reduces:
            yield from self._reduction(unit, made)
        else:
            yield 0, total - made  # Kept in the dtype of the reduction

    def _reduction(self, unit: Unit, made: float) -> Steps:
        states = self.states
        yield 0, -self.sent  # End of the previous reduction
        self.passed += unit.numel
        self.sent = states.reduce * unit.padded * states.is_sharded
        buckets = states.buckets[self.backward.stage]
        if self.passed < self.unit.numel and not states.experts.numel:
            # Only full buckets are sent.
            full = self.passed - self.passed % states.bucket
            buckets = min(buckets, 2 * states.reduce * full)
        self.sent += buckets
        yield self.sent, self.sent - made  # Gradients copied for the reduction
        reduced = states.reduced * unit.shard
        # One shard is divided by 1, into a copy.
        copy = self.sent * (states.is_sharded and unit.shard == unit.padded)
        yield reduced + copy, reduced  # Reduced gradients

    def _weights(self) -> Steps:
        """The second half of a split backward pass: all gradients, then their reduction."""
        states = self.states
        _, halved, _, _, unreduced, *_ = self.each
        made = self.made * self.unit.numel
        one = halved / max(self.part.layers + self.part.head, 1)  # Freed after its gradients.
        yield made - halved + one, made - halved  # Gradients, less inputs and output gradients
        if self.backward.has_gradients:
            unreduced = 0
        yield 0, unreduced - made  # Kept in the dtype of the reduction
        if self.backward.is_last:
            for unit in (states.experts, states.block, self.end):
                yield from self._reduction(unit, states.summed * unit.numel * states.is_sharded)


def _highest(steps: Steps) -> tuple[float, float]:
    """Returns the highest sum during or after a step, and the sum of all."""
    now = 0.0
    most = -float("inf")
    for during, after in steps:
        if now + during > most:
            most = now + during
        now += after
        most = max(most, now)
    return most, now

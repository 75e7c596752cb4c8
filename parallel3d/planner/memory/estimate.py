"""Peak memory of a pipeline rank that runs parallel3d: before or after a backward pass, or in the
optimizer step.

      static bytes          parameters, optimizer states and full gradients, by strategy (`states`)
    + activations           live microbatches (`live`) x bytes that a stage saves per microbatch
    + sharded gradients     of the stages that have had a backward pass
    + unsharded parameters  of the stages with live microbatches
    + temporaries           of the first operators of a backward pass (loss or last block) or of the
                            last ones (first block, embedding)
    + messages              between stages, and copies of gradients in reduction

The estimate is conservative: temporaries are added to all live activations.
"""

from __future__ import annotations

from operator import mul

from parallel3d.planner.memory.live import COMPLETE, Backward, fullest_backwards
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.states import RankStates, Unit
from parallel3d.planner.memory.temporaries import microbatch_bytes
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.schedules.schedule import SENDS_KEPT, Kind


class RankEstimate:
    """Estimates the peak memory of one pipeline rank."""

    def __init__(self, run: PlannedRun, rank: int) -> None:
        layout = run.layout
        self.run = run
        self.rank = rank
        self.states = states = RankStates(run, rank)
        self.microbatch = self.dense = microbatch_bytes(run)
        if run.shape.first_dense:  # `dense` is that of blocks without experts.
            self.dense = microbatch_bytes(run, dense=True)
        # Bytes of the next unit, which is all-gathered in advance, and of an all-gathered block, or
        # 0 without sharding. The experts of a block are a unit of their own.
        self.ahead = states.item * states.block.padded * states.is_sharded
        self.block = self.ahead + states.item * states.experts.padded * states.is_sharded
        self._backwards = fullest_backwards(
            layout.schedule,
            layout.pp,
            rank,
            layout.microbatches,
            layout.virtual_stages,
        )
        self._each: list[float] = []
        # The index of a stage's first block determines which of its blocks are recomputed.
        for stage, (_, first) in enumerate(states.stages):
            self._each += self._bytes(stage, first)

    def _bytes(self, stage: int, first: int) -> tuple[float, ...]:
        """Returns the bytes that each of the five numbers in a stage's state (`Backward`) counts.

        They are a microbatch's activations before its backward pass and between its halves, the
        unsharded parameters, and the gradients before and after the last backward pass.
        """
        states = self.states
        microbatch = self.microbatch
        part = states.parts[stage]
        unit = states.units[stage]
        end = states.ends[stage]
        every = self.run.layout.recompute_every
        again = len(range(-first % every, part.layers, every))  # Number of recomputed blocks.
        saved = again * microbatch.kept + (part.layers - again) * microbatch.saved
        halved = part.layers * microbatch.halved
        if part.dense:  # The first blocks of the stage have no experts.
            again = len(range(-first % every, part.dense, every))
            dense = self.dense
            saved += again * (dense.kept - microbatch.kept)
            saved += (part.dense - again) * (dense.saved - microbatch.saved)
            halved += part.dense * (dense.halved - microbatch.halved)
        head = microbatch.saved_by_head * part.head
        unsharded = unit.padded * states.is_sharded
        if states.frees_forward:  # Only the parameters for the loss stay unsharded.
            unsharded = end.padded * part.head
        unreduced = 0.0
        if states.reduces_each:  # The gradients of the last unit may still be in flight.
            last = max(end.padded, states.block.padded)
            unreduced = states.master * unit.shard + states.reduce * last
        elif states.is_sharded:
            unreduced = max(states.reduce, states.master) * unit.numel
        return (
            saved + head,
            halved + head,
            states.item * unsharded,
            unreduced,
            states.reduced * unit.shard + states.buckets[stage],
        )

    def _by_kind(self, counts: tuple[int, ...]) -> list[float]:
        return [sum(map(mul, counts[at::5], self._each[at::5])) for at in range(5)]

    @property
    def least_bytes(self) -> tuple[float, float]:
        """Lower bounds: bytes of states and of activations when most microbatches are live.

        In a search over one tp x pp, the first varies with data-parallel sharding, the second
        with recompute.
        """
        fullest = max(self._backwards, key=lambda each: each.waiting)
        saved, halved, unsharded, *_ = self._by_kind(fullest.before)
        scale = self.run.cluster.scales.memory
        return sum(self.states.static_bytes) + scale * unsharded, scale * (saved + halved)

    def peak(self) -> RankMemory:
        """Returns the rank's memory at its peak."""
        states = self.states
        run = self.run
        step = max(states.muon_step_bytes - sum(states.buckets), 0.0)
        moments = [(COMPLETE * len(states.parts), step, "optimizer's step")]
        for backward in self._backwards:
            states_of = backward.before, backward.after
            for state, work in zip(states_of, self._temporaries(backward), strict=True):
                moments.append((state, work + self._head_gradient(state), "backward"))
        counts, work, moment = max(moments, key=lambda at: sum(map(mul, at[0], self._each)) + at[1])
        saved, halved, unsharded, unreduced, reduced = self._by_kind(counts)
        logits = counts[-5] * self.microbatch.logits * states.parts[-1].head
        parameters, gradients, optimizer = states.static_bytes
        saved += halved - logits
        if run.layout.pp > 1:
            unsharded += 2 * min(SENDS_KEPT, run.layout.microbatches) * self.microbatch.hidden
        fragmentation = context = 0.0
        if not run.on_cpu:
            framework = run.framework
            fragmentation = framework.cache_bytes
            fragmentation += framework.fragmentation * (saved + logits + unsharded + work)
            context = framework.context_bytes
        return RankMemory(
            rank=self.rank,
            parameters=parameters,
            gradients=gradients + unreduced + reduced + min(work, 0.0),
            optimizer=optimizer,
            activations=saved,
            logits=logits,
            buffers=unsharded,
            temporary=max(work, 0.0),
            fragmentation=fragmentation,
            context=context,
            moment=moment,
        )

    def _head_gradient(self, counts: tuple[int, ...]) -> float:
        """Returns the bytes of the head's gradient before any weight-gradient half of its stage.

        A loss in chunks makes it in the input-gradient half. Otherwise it is made later, and the
        logits stay alive.
        """
        states = self.states
        _, halved, _, has_gradients, _ = counts[-5:]
        is_sharded = states.is_sharded and states.parts[-1].head
        if has_gradients or self.microbatch.logits or not (halved and is_sharded):
            return 0.0
        return max(states.reduce, states.master) * states.ends[-1].numel

    def _temporaries(self, backward: Backward) -> tuple[float, float]:
        """Returns the bytes of temporaries in the first and the last operators of a backward pass.

        The first operators are loss, head and last block; the last are first block and embedding.
        """
        states = self.states
        layout = self.run.layout
        frees_each = layout.gather_cadence == "microbatch"
        microbatch = self.microbatch
        part = states.parts[backward.stage]
        if part.dense:  # The stage has blocks without experts.
            microbatch = max(self.dense, microbatch, key=lambda kind: kind.saved + kind.backward)
        sent = self._sent(backward, states.block)
        sent_experts = self._sent(backward, states.experts)
        experts = states.experts.numel
        end = states.ends[backward.stage]
        end_sent = self._sent(backward, end)
        end_made = states.item * end.numel * states.is_sharded
        if backward.kind is Kind.WEIGHT:
            made = 0  # Bytes of the gradients in the compute dtype, which exist all at once.
            if states.is_sharded and backward.has_gradients and states.item < states.master:
                made = states.item * states.units[backward.stage].numel
            gathered = 0.0  # If each microbatch gathers, the input half has freed the parameters.
            at = 5 * backward.stage
            if frees_each and not backward.before[at]:
                if not states.frees_forward:  # Else it is the buffer of the head's all-gather.
                    gathered = self._each[at + 2]
            else:  # Experts are resharded before their gradients are reduced.
                sent_experts -= self.block - self.ahead
            last = max(made, sent, sent_experts, end_sent)
            return microbatch.embedding - gathered, last - gathered
        block = microbatch.saved + microbatch.backward
        block *= part.layers > 0  # Else the stage has only the head.
        last = max(block, sent)
        # The gradient of the embedding is made in this half, too.
        if backward.kind is Kind.INPUT and not part.embedding:
            last -= microbatch.halved / 2
        freed = self.block
        if states.frees_forward:
            freed = 0
            block += self.block + self.ahead
            last += self.block - self.ahead  # Of experts.
        # Gradients in reduction add memory, unless unreduced gradients are counted already.
        # With experts, each block fills its own buckets.
        others = 1 if experts else 1 - 1 / max(part.layers, 1)
        if states.is_sharded:
            others = not backward.has_gradients or states.reduces_each
        # Bytes that the last two blocks keep for their backward passes, which free them.
        stop = states.stages[backward.stage][1] + part.layers
        kept, kept_before = (
            microbatch.saved if (stop - back) % layout.recompute_every else microbatch.kept
            for back in (1, 2)
        )
        after_one = block + sent * others
        if experts and part.layers > part.dense:
            if kept_before < microbatch.saved:  # The next block is recomputed meanwhile.
                again = microbatch.saved + microbatch.forward + microbatch.hidden
                again += kept + kept_before  # Their inputs are still alive.
                again += states.frees_forward * (self.block + self.ahead)
                after_one = max(after_one, again + sent * others)
            # Their gradients are copied after their backward pass, and reduced during that of the
            # rest of the block. Those of the rest are reduced during that of the next experts.
            meanwhile = sent_experts * others + microbatch.saved
            meanwhile += max(microbatch.rest, states.item * experts * states.is_sharded)
            after_one = max(after_one, meanwhile)
            last = max(last, meanwhile - states.reduced * states.experts.shard)
        after_one -= kept_before
        if backward.is_last or frees_each:
            after_one -= freed
        # Parameters of the next block are all-gathered in advance.
        forward = self.block + max(microbatch.saved + microbatch.forward, self.ahead)
        first = max(forward, block, after_one) - kept
        if part.head:
            if part.embedding and self.run.shape.tied_embeddings:
                first += end_made
            passed = microbatch.saved_by_head
            if backward.kind is Kind.INPUT:
                passed = microbatch.logits
            first = max(
                microbatch.loss + self.ahead * states.frees_forward,
                max(first, end_sent) - passed,
            )
        is_late = states.item == states.master and not states.is_sharded
        if self.run.shape.saved and is_late and not backward.has_gradients:
            first -= states.master * states.units[backward.stage].numel  # of gradients not made yet
        if part.embedding:
            last = max(last, microbatch.embedding, end_made + end_sent)
        if backward.is_last:  # The state after it has the buckets.
            last -= states.buckets[backward.stage]
        elif states.reduces_each:
            # The gradient in flight (`_bytes`) is that of a block, and not of the embedding.
            last -= states.reduce * max(0, end.padded - states.block.padded)
        return first, last

    def _sent(self, backward: Backward, unit: Unit) -> float:
        """Returns the bytes of a unit's gradient reduction, or of the buckets if replicated."""
        states = self.states
        if not backward.is_last and not states.reduces_each:
            return 0.0
        if states.is_sharded:
            return states.reduce * unit.padded + states.reduced * unit.shard
        return states.buckets[backward.stage]

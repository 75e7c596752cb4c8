"""Peak memory of a pipeline rank that runs parallel3d: before or after a backward pass, or in the
optimizer step.

      static bytes          parameters, optimizer states and full gradients, by strategy (`states`)
    + activations           live microbatches (`live`) x bytes that a stage saves per microbatch
    + sharded gradients     of the stages that have had a backward pass
    + unsharded parameters  of the stages with live microbatches
    + steps                 of a backward pass over loss, head and last blocks, or over first blocks
                            and embedding (`backward_walk`)
    + messages              between stages, and copies of gradients in reduction

The estimate is conservative: temporaries are added to all live activations.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from operator import attrgetter, mul

from parallel3d.planner.memory.backward_walk import BackwardWalk
from parallel3d.planner.memory.live import (
    COMPLETE,
    fullest_backwards,
)
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.states import RankStates
from parallel3d.planner.memory.temporaries import MicrobatchBytes, microbatch_bytes
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Kind


class RankEstimate:
    """Estimates the peak memory of one pipeline rank."""

    def __init__(self, run: PlannedRun, rank: int) -> None:
        layout = run.layout
        self.run = run
        self.rank = rank
        self._backwards = fullest_backwards(
            layout.schedule, layout.pp, rank, layout.microbatches, layout.virtual_stages
        )
        self._fullest = max(self._backwards, key=attrgetter("live")).before

    @cached_property
    def states(self) -> RankStates:
        return RankStates(self.run, self.rank)

    @cached_property
    def microbatch(self) -> MicrobatchBytes:
        return microbatch_bytes(self.run)

    @cached_property
    def dense(self) -> MicrobatchBytes:
        """Bytes of a microbatch in blocks without experts."""
        if self.run.shape.first_dense:
            return microbatch_bytes(self.run, dense=True)
        return self.microbatch

    def _activations(self, part: StageSlice, first: int) -> tuple[float, float]:
        """Returns a microbatch's activations in a stage before its backward pass and between its
        halves. The index of the first block determines which blocks are recomputed."""
        microbatch = self.microbatch
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
        return saved + head, halved + head

    def _bytes(self, stage: int) -> tuple[float, ...]:
        """Returns the bytes that each number in a stage's state (`StageState`) counts: a
        microbatch's activations, unsharded parameters, and gradients before and after the last
        backward pass."""
        states = self.states
        part = states.parts[stage]
        unit = states.units[stage]
        end = states.ends[stage]
        has_chunks = not self.microbatch.logits
        of_input_half = end.numel * states.is_sharded * (part.embedding or has_chunks)
        unreduced = 0.0
        if states.reduces_each:  # The gradients of the last unit may still be in flight.
            last = end.padded
            if part.layers and not part.embedding:
                last = states.block.padded
            unreduced = states.master * unit.shard + states.reduce * last
        elif states.is_sharded:
            unreduced = states.summed * unit.numel
        return (
            *self._activations(*states.stages[stage]),
            *states.unsharded(stage),
            unreduced,
            states.reduced * unit.shard + states.buckets[stage],
            states.summed * of_input_half,
        )

    @property
    def least_states(self) -> float:
        """Lower bound of the bytes of parameters, gradients and optimizer states."""
        states = self.states
        unsharded = 0.0
        for stage, state in enumerate(self._fullest):
            # These two numbers of a state count unsharded parameters.
            unsharded += sum(map(mul, state[2:4], states.unsharded(stage)))
        return sum(states.static_bytes) + self.run.cluster.scales.memory * unsharded

    @property
    def least_activations(self) -> float:
        """Lower bound of the bytes of activations, when most microbatches are live."""
        total = 0.0
        for state, stage in zip(self._fullest, self.run.stages_of(self.rank), strict=True):
            # The first two numbers of a state count these.
            total += sum(map(mul, state, self._activations(*stage)))
        return self.run.cluster.scales.memory * total

    def peak(self) -> RankMemory:
        """Returns the rank's memory at its peak."""
        states = self.states
        run = self.run
        frees_each = run.layout.gather_cadence == "microbatch"
        each = [self._bytes(stage) for stage in range(len(states.stages))]
        step = max(states.muon_step_bytes - sum(states.buckets), 0.0)
        moments = [((COMPLETE,) * len(states.parts), step, "optimizer's step")]
        walks: dict[object, BackwardWalk] = {}
        for backward in self._backwards:
            part, first = states.stages[backward.stage]
            # Equal stages have equal steps.
            same = (
                part,
                first % run.layout.recompute_every,
                frees_each and backward.before[backward.stage].is_gathered,
                backward[1:4],
            )
            if same not in walks:
                walks[same] = BackwardWalk(
                    states, backward, self.microbatch, self.dense, each[backward.stage]
                )
            moments.append((backward.before, walks[same].first, "backward"))
            if backward.kind is not Kind.WEIGHT:
                moments.append((backward.after, walks[same].last, "backward"))
        each_bytes = [*chain(*each)]
        stages, work, moment = max(
            moments, key=lambda at: sum(map(mul, chain(*at[0]), each_bytes)) + at[1]
        )
        bytes_ = [*map(mul, chain(*stages), each_bytes)]
        kinds = len(COMPLETE)
        by_kind = [sum(bytes_[kind::kinds]) for kind in range(kinds)]
        saved, halved, until_last, until_next, *gradients_made = by_kind
        unsharded = until_last + until_next
        logits = stages[-1].waiting * self.microbatch.logits * states.parts[-1].head
        parameters, gradients, optimizer = states.static_bytes
        saved += halved - logits
        if run.layout.pp > 1:
            # Sent activations and gradients, and those received ahead of their use. With one stage
            # per rank, only gradients are.
            is_interleaved = run.layout.virtual_stages > 1
            sends_both = is_interleaved or 0 < self.rank < run.layout.pp - 1
            messages = SENDS_KEPT * (1 + sends_both) + (RECEIVES_AHEAD + 1) * (1 + is_interleaved)
            unsharded += min(messages, 3 * run.layout.microbatches) * self.microbatch.hidden
        fragmentation = context = 0.0
        if not run.on_cpu:
            framework = run.framework
            fragmentation = framework.cache_bytes
            fragmentation += framework.fragmentation * (saved + logits + unsharded + work)
            context = framework.context_bytes
        return RankMemory(
            rank=self.rank,
            parameters=parameters,
            gradients=gradients + sum(gradients_made) + min(work, 0.0),
            optimizer=optimizer,
            activations=saved,
            logits=logits,
            buffers=unsharded,
            temporary=max(work, 0.0),
            fragmentation=fragmentation,
            context=context,
            moment=moment,
        )

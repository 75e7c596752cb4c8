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

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, mul

from parallel3d.planner.memory.backward_walk import BackwardWalk
from parallel3d.planner.memory.live import (
    COMPLETE,
    StageState,
    fullest_backwards,
)
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.states import RankStates
from parallel3d.planner.memory.temporaries import microbatch_bytes
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Kind


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
        self._backwards = fullest_backwards(
            layout.schedule,
            layout.pp,
            rank,
            layout.microbatches,
            layout.virtual_stages,
            frees_each=layout.gather_cadence == "microbatch",
        )
        # The index of a stage's first block determines which of its blocks are recomputed.
        self._each = [self._bytes(stage, first) for stage, (_, first) in enumerate(states.stages)]

    def _bytes(self, stage: int, first: int) -> tuple[float, ...]:
        """Returns the bytes that each number in a stage's state (`StageState`) counts.

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
        of_input_half = end.numel * states.is_sharded * (part.embedding or not microbatch.logits)
        unsharded = unit.padded * states.is_sharded
        if states.frees_forward:  # Only the parameters for the loss stay unsharded.
            unsharded = end.padded * part.head
        unreduced = 0.0
        if states.reduces_each:  # The gradients of the last unit may still be in flight.
            last = end.padded
            if part.layers and not part.embedding:
                last = states.block.padded
            unreduced = states.master * unit.shard + states.reduce * last
        elif states.is_sharded:
            unreduced = states.summed * unit.numel
        return (
            saved + microbatch.saved_by_head * part.head,
            halved + microbatch.saved_by_head * part.head,
            states.item * unsharded,
            unreduced,
            states.reduced * unit.shard + states.buckets[stage],
            states.summed * of_input_half,
        )

    def _by_kind(self, stages: Sequence[StageState]) -> list[float]:
        """Returns the bytes that each number in the states counts, summed over the stages."""
        bytes_ = [[*map(mul, *pair)] for pair in zip(stages, self._each, strict=True)]
        return [*map(sum, zip(*bytes_, strict=True))]

    @property
    def least_bytes(self) -> tuple[float, float]:
        """Lower bounds: bytes of states and of activations when most microbatches are live.

        In a search over one tp x pp, the first varies with data-parallel sharding, the second
        with recompute.
        """
        fullest = max(self._backwards, key=attrgetter("live"))
        saved, halved, unsharded, *_ = self._by_kind(fullest.before)
        scale = self.run.cluster.scales.memory
        return sum(self.states.static_bytes) + scale * unsharded, scale * (saved + halved)

    def peak(self) -> RankMemory:
        """Returns the rank's memory at its peak."""
        states = self.states
        run = self.run
        step = max(states.muon_step_bytes - sum(states.buckets), 0.0)
        moments = [((COMPLETE,) * len(states.parts), step, "optimizer's step")]
        walks: dict[object, BackwardWalk] = {}
        for backward in self._backwards:
            part, first = states.stages[backward.stage]
            # Equal stages have equal steps.
            same = (
                part,
                first % run.layout.recompute_every,
                backward.before[backward.stage].is_gathered,
                backward[1:4],
            )
            if same not in walks:
                each = self._each[backward.stage]
                walks[same] = BackwardWalk(states, backward, self.microbatch, self.dense, each)
            moments.append((backward.before, walks[same].first, "backward"))
            if backward.kind is not Kind.WEIGHT:
                moments.append((backward.after, walks[same].last, "backward"))
        each_bytes = [*chain(*self._each)]
        stages, work, moment = max(
            moments, key=lambda at: sum(map(mul, chain(*at[0]), each_bytes)) + at[1]
        )
        saved, halved, unsharded, *gradients_made = self._by_kind(stages)
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

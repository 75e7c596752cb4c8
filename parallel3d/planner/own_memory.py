"""The memory of this project's own engine: what its runtime, its layers and its sharding hold at once. `parallel3d-plan
verify` compares it with a dry run of the real thing (docs/verify.md).

    own_states      the schedule's actions on a rank, and what it has at hand before each of them (`own_traffic`: of
                    what travels between stages)
    own_rank        what the rank has: the bytes of its stages in every state; the table of the data dimension
    own_moments     the moments within an action: its stage's blocks, one after the other
    own_work        what a block makes for itself meanwhile; `own_ends`: embedding, head and loss
    own_buckets     gradients on their way, where they are sent whole

The fullest of all moments, or the optimizer's step after them, is what the rank needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.pipeline.schedule import Kind
from parallel3d.planner.job import Job
from parallel3d.planner.own_buckets import published_by
from parallel3d.planner.own_moments import Moment, Moments, What
from parallel3d.planner.own_rank import Rank
from parallel3d.planner.own_states import State, fullest_states


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes held at one moment of a step, by kind."""

    moment: What
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    temporary: float

    @property
    def total(self) -> float:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.temporary


def most_held(job: Job, rank: int) -> Held:
    """At the moment of a step when a pipeline rank holds most."""
    has = Rank(job, rank)
    moments = Moments(has)
    states = fullest_states(has.walk)
    found = [moment for state in states for moment in moments.of(state)]
    fullest = max([*found, _step(has, states)], key=lambda moment: moment.total)
    parameters, gradients, optimizer = has.at_rest
    return Held(
        moment=fullest.what,
        parameters=parameters,
        gradients=gradients + fullest.gradients,
        optimizer=optimizer,
        activations=fullest.activations,
        logits=fullest.logits,
        buffers=fullest.buffers,
        temporary=fullest.temporary,
    )


def least_held(job: Job, rank: int) -> tuple[float, float, float]:
    """Bytes that a rank has at least when most of its forwards are alive: at rest, in gathered parameters, and in
    activations with logits. The first two are alike whatever is recomputed and however large a microbatch is."""
    has = Rank(job, rank)
    kinds = has.kinds

    def alive(state: State) -> int:
        return sum(n * (kind.blocks + kind.part.head) for n, kind in zip(state.alive, kinds, strict=True))

    begun = (state for state in fullest_states(has.walk) if state.kind in (Kind.BACKWARD, Kind.INPUT))
    fullest = max(begun, key=alive)
    activations = sum(n * (kind.kept + kind.logits) for n, kind in zip(fullest.alive, kinds, strict=True))
    gathered = sum(n * has.gathered_by_forward(kind) for n, kind in zip(fullest.after_forward, kinds, strict=True))
    stage = has.stages[fullest.stage]
    return sum(has.at_rest), gathered, activations - stage.logits


def _step(has: Rank, states: tuple[State, ...]) -> Moment:
    gradients = sum(map(has.reduced_gradients, has.stages))
    published = max(published_by(has.job, stage.part) for stage in has.stages) if has.whole else 0.0
    waiting = max(state.waiting for state in states) * has.sizes.b
    return Moment("optimizer's step", gradients, 0.0, 0.0, waiting, published)

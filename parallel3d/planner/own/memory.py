"""The memory of this project's own program: what its runtime, its layers and its sharding hold at once.
`parallel3d-plan verify` compares it with a dry run of the real thing (docs/verify.md).

    states      the schedule's actions on a rank, and what it has at hand before each of them (`traffic`: of
                    what travels between stages)
    rank        what the rank has: the bytes of its stages in every state; the table of the data dimension
    moments     the moments within an action: its stage's blocks, one after the other
    work        what a block makes for itself meanwhile; `ends`: embedding, head and loss
    buckets     gradients on their way, where they are sent whole
    stepped     the moments where a backward steps each parameter
    step        an optimizer whose states are not so many bytes for each number

The fullest of all moments, or the optimizer's step after them, is what the rank needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, cast

from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.own.buckets import published_by
from parallel3d.planner.own.moment import Moment, What, total
from parallel3d.planner.own.moments import Moments
from parallel3d.planner.own.rank import Rank
from parallel3d.planner.own.states import received_into
from parallel3d.planner.own.stepped import SteppedMoments
from parallel3d.schedules.live import live_microbatches, live_with_all_gradients
from parallel3d.schedules.registry import SCHEDULES, ScheduleName


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


def most_held(run: PlannedRun, rank: int) -> Held:
    """At the moment of a step when a pipeline rank holds most."""
    has = Rank(run, rank)
    moments = SteppedMoments(has) if has.steps_alone else Moments(has)
    fullest = max(moments.fullest(), _step(has), key=total)
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


class Least(NamedTuple):
    """Bytes that a rank has at least, at rest and at two moments: when most of its forwards are alive; and when it has
    all of its gradients, unreduced. Only `activations` and `amid` depend on what is recomputed and on how large a
    microbatch is."""

    at_rest: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0  # with logits
    gathered_amid: float = 0.0
    gradients: float = 0.0
    amid: float = -inf  # activations beside the gradients; there is no such moment that one knows of


def least_held(run: PlannedRun, rank: int) -> Least:
    has, layout = Rank(run, rank), run.layout
    gathered = sum(map(has.gathered_by_forward, has.stages))
    name = cast(ScheduleName, layout.schedule)
    if SCHEDULES[name].splits_backward:  # it is for the schedule to say how many are alive
        return Least(sum(has.at_rest), gathered)
    depth = {
        "pp": layout.pp,
        "rank": rank,
        "microbatches": layout.microbatches,
        "virtual_stages": layout.virtual_stages,
    }
    each = min(kind.kept for kind in has.kinds)
    amid = live_with_all_gradients(name, **depth)
    return Least(
        at_rest=sum(has.at_rest),
        gathered=gathered,
        activations=live_microbatches(name, **depth) * each,
        gathered_amid=0.0 if layout.gather == "microbatch" else gathered,
        gradients=sum(has.whole_gradients(stage) - has.sent_last(stage) for stage in has.stages),
        amid=-inf if amid is None else amid * each,
    )


def _step(has: Rank) -> Moment:
    gradients = sum(map(has.reduced_gradients, has.stages))
    published = max(published_by(has.run, stage.part) for stage in has.stages) if has.whole else 0.0
    received = received_into(has.walk) * has.sizes.b  # memory that the next step receives into, too
    temporary = max(published, 0.0 if has.run.steps_in_backward else has.step_bytes)
    return Moment("optimizer's step", gradients, has.throughout, 0.0, received, temporary)

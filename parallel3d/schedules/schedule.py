"""A pipeline schedule as plain data: for each pipeline rank, the forwards and backwards that it does, in order.

The runtime executes it and the simulator times it. Sends and receives are not part of it, because they follow from
which rank holds which stage. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

RECEIVES_AHEAD = 2  # receives that the transport posts beyond the one waited for, from each rank
SENDS_KEPT = 4  # sends to each rank before the oldest is waited for; its receive is always posted, so none blocks


class Kind(StrEnum):
    """What an action does. A stage's microbatch has one full backward, or the two halves of it: the input's gradient
    and later the weights', with other work between them to fill a bubble (Qi et al. 2023, arXiv 2401.10241)."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients
    INPUT = "I"  # the gradient of the stage's input, which the stage before waits for
    WEIGHT = "W"  # the gradients of its weights, which nobody waits for


class Action(NamedTuple):
    """One stage's work on one microbatch, written `2F0`: stage 2, forward, microbatch 0. It is a named tuple because a
    schedule has hundreds of thousands of them: a frozen dataclass takes 5 times as long to make and 3 times to hash."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each pipeline rank does, in order. `placement[stage]` is the rank that holds the stage; stages count from 0,
    and two in a row may stand on one rank."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    trains: bool = True  # False where there are forwards alone

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is done in two halves."""
        return bool(self._split)

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages on a rank, in the order of the model."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def feeds(self, action: Action) -> Action | None:
        """Returns the action, on any rank, that takes what `action` makes: the next stage's forward, or the backward of
        the stage before, whole or split as the schedule has it. Returns None at the ends of the pipeline, and for the
        weights' gradients, which stay where they are."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            return Action(stage + 1, kind, microbatch) if stage + 1 < self.stages else None
        if kind is Kind.WEIGHT or stage == 0:
            return None
        return self.backward_of(stage - 1, microbatch)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Returns the actions that must be done before `action`."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            return (Action(stage - 1, kind, microbatch),) if stage > 0 else ()
        if kind is Kind.WEIGHT:
            return (Action(stage, Kind.INPUT, microbatch),)
        own = Action(stage, Kind.FORWARD, microbatch)
        return (own, self.backward_of(stage + 1, microbatch)) if stage + 1 < self.stages else (own,)

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """Returns the action that makes the gradient of a stage's input: the full backward, or its first half."""
        return Action(stage, Kind.INPUT if (stage, microbatch) in self._split else Kind.BACKWARD, microbatch)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((a.stage, a.microbatch) for actions in self.ranks for a in actions if a.kind is Kind.INPUT)

    @cached_property
    def transfers(self) -> dict[tuple[int, int], tuple[Action, ...]]:
        """What is sent from each (source rank, target rank), in the source's order; an item is the action that takes
        it."""
        transfers: dict[tuple[int, int], list[Action]] = {}
        for source, actions in enumerate(self.ranks):
            for taker in filter(None, map(self.feeds, actions)):
                if self.placement[taker.stage] != source:
                    transfers.setdefault((source, self.placement[taker.stage]), []).append(taker)
        return {ranks: tuple(takers) for ranks, takers in transfers.items()}

    @cached_property
    def last_backwards(self) -> frozenset[Action]:
        """The last action of each stage that adds to its weights' gradients, which are complete after it."""
        last = {a.stage: a for actions in self.ranks for a in actions if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
        return frozenset(last.values())

    @cached_property
    def peak_live_microbatches(self) -> tuple[int, ...]:
        """The most forwards, each of one stage, whose activations wait on a rank at once for their backward, or for its
        second half where the backward is split. One number per rank."""
        change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
        return tuple(max(accumulate((change[a.kind] for a in actions), initial=0)) for actions in self.ranks)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(action) for action in actions) for actions in self.ranks)

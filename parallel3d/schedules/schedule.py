"""A pipeline schedule as plain data: for each pipeline rank, the forwards and backwards that it
does, in order.

The runtime executes it and the simulator times it. Sends and receives are not part of it, because
they follow from which rank holds which stage. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

from parallel3d.errors import ScheduleError

RECEIVES_AHEAD = 2  # receives that the transport posts beyond the one waited for, from each rank
# sends to each rank before the oldest is waited for; tests/test_nccl_rules.py shows that all end
SENDS_KEPT = 4


class Kind(StrEnum):
    """What an action does. A stage's microbatch has one full backward, or the two halves of it: the
    input's gradient and later the weights', with other work between them to fill a bubble (Qi et
    al. 2023, arXiv 2401.10241)."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients
    INPUT = "I"  # the gradient of the stage's input, which the stage before waits for
    WEIGHT = "W"  # the gradients of its weights, which nobody waits for


class Action(NamedTuple):
    """One stage's work on one microbatch, written `2F0`: stage 2, forward, microbatch 0. It is a
    named tuple because a schedule has hundreds of thousands of them: a frozen dataclass takes 5
    times as long to make and 3 times to hash."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each pipeline rank does, in order. `placement[stage]` is the rank that holds the stage;
    stages count from 0, and two in a row may stand on one rank."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    trains: bool = True  # False where there are forwards alone
    _postable: dict[int, Mapping[Action, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        """Returns the action, on any rank, that takes what `action` makes: the next stage's
        forward, or the backward of the stage before, whole or split as the schedule has it.
        Returns None at the ends of the pipeline, and for the weights' gradients, which stay
        where they are."""
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
        """Returns the action that makes the gradient of a stage's input: the full backward, or its
        first half."""
        return Action(
            stage, Kind.INPUT if (stage, microbatch) in self._split else Kind.BACKWARD, microbatch
        )

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        inputs = (a for a in chain.from_iterable(self.ranks) if a.kind is Kind.INPUT)
        return frozenset((stage, microbatch) for stage, _, microbatch in inputs)

    @cached_property
    def transfers(self) -> dict[tuple[int, int], tuple[Action, ...]]:
        """What is sent from each (source rank, target rank), in the source's order; an item is the
        action that takes it."""
        transfers: dict[tuple[int, int], list[Action]] = {}
        for source, actions in enumerate(self.ranks):
            for taker in filter(None, map(self.feeds, actions)):
                if self.placement[taker.stage] != source:
                    transfers.setdefault((source, self.placement[taker.stage]), []).append(taker)
        return {ranks: tuple(takers) for ranks, takers in transfers.items()}

    def in_order(self) -> Iterator[tuple[int, Action]]:
        """Yields (rank, action) for all actions of a complete schedule, each after the actions that
        it needs. Raises ScheduleError where no such order exists, naming where each rank stands and
        what it waits for."""
        microbatches, last = self.microbatches, self.stages - 1
        forward_done = bytearray(self.stages * microbatches)
        gradient_done = bytearray(self.stages * microbatches)
        position = [0] * len(self.ranks)
        # (is a forward, its place) -> the rank that waits for it
        waiting: dict[tuple[bool, int], int] = {}
        ready = list(reversed(range(len(self.ranks))))
        while ready:
            rank = ready.pop()
            actions = self.ranks[rank]
            for at in range(position[rank], len(actions)):
                action = actions[at]
                stage, kind, microbatch = action
                place = stage * microbatches + microbatch
                if kind is Kind.FORWARD:
                    if stage > 0 and not forward_done[place - microbatches]:
                        waiting[True, place - microbatches] = rank
                        break
                elif kind is Kind.WEIGHT:
                    if not gradient_done[place]:
                        break
                elif not forward_done[place]:
                    break
                elif stage < last and not gradient_done[place + microbatches]:
                    waiting[False, place + microbatches] = rank
                    break
                yield rank, action
                position[rank] = at + 1
                if kind is not Kind.WEIGHT:
                    (forward_done if kind is Kind.FORWARD else gradient_done)[place] = 1
                    waiter = waiting.pop((kind is Kind.FORWARD, place), None)
                    if waiter is not None:
                        ready.append(waiter)
        if position == [len(actions) for actions in self.ranks]:
            return
        done: set[Action] = set()
        for actions, at in zip(self.ranks, position, strict=True):
            done.update(actions[:at])
        stuck = []
        for rank, (actions, at) in enumerate(zip(self.ranks, position, strict=True)):
            if at < len(actions):
                missing = [need for need in self.needs(actions[at]) if need not in done]
                stuck.append(f"rank {rank} at {actions[at]} waits for {missing[0]}")
        raise ScheduleError(f"schedule {self.name} stops before its end: {'; '.join(stuck)}")

    def postable_after(self, rank: int) -> Mapping[Action, int]:
        """Returns, for each action of `rank` that takes what another rank sends, how many of this
        rank's own actions must have been issued before that can come: the data follows from them,
        whatever way it takes over other ranks. A receive that is posted earlier would stand in the
        way of its own cause wherever a device works off what it was given before it takes more. It
        is found once, in one pass over the schedule."""
        if rank not in self._postable:
            found: dict[Action, int] = {}
            # How many of the rank's own actions come before all that another rank has done so far,
            # and before each action.
            before = [0] * len(self.ranks)
            before_action: dict[Action, int] = {}
            for holder, action in self.in_order():
                # the last one is the only one that may be on another rank
                needs = self.needs(action)
                taken = before_action[needs[-1]] if needs else 0
                if holder != rank:
                    before[holder] = max(before[holder], taken)
                else:
                    before[rank] += 1
                    if needs and self.placement[needs[-1].stage] != rank:
                        found[action] = taken
                before_action[action] = before[holder]
            self._postable[rank] = found
        return self._postable[rank]

    def first_of_each_kind(self, rank: int) -> Schedule:
        """Returns the schedule of a few of the microbatches, in which each stage of a rank does
        every kind of action that it does in the whole one (a stage may have some backwards whole
        and others in halves)."""
        first: dict[tuple[int, Kind], int] = {}
        for stage, kind, microbatch in self.ranks[rank]:
            first.setdefault((stage, kind), microbatch)
        few = set(first.values())
        ranks = []
        for actions in self.ranks:
            ranks.append(tuple(action for action in actions if action.microbatch in few))
        return replace(self, ranks=tuple(ranks))

    @cached_property
    def last_backwards(self) -> frozenset[Action]:
        """The last action of each stage that adds to its weights' gradients, which are complete
        after it."""
        ending = (Kind.BACKWARD, Kind.WEIGHT)
        last = {a.stage: a for a in chain.from_iterable(self.ranks) if a.kind in ending}
        return frozenset(last.values())

    @cached_property
    def peak_live_microbatches(self) -> tuple[int, ...]:
        """The most forwards, each of one stage, whose activations wait on a rank at once for their
        backward, or for its second half where the backward is split. One number per rank."""
        change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
        peaks = []
        for actions in self.ranks:
            changes = [change[action.kind] for action in actions]
            peaks.append(max(accumulate(changes, initial=0)))
        return tuple(peaks)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(action) for action in actions) for actions in self.ranks)

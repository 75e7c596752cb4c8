"""Pipeline schedule as plain data, without torch: the actions of each pipeline rank, in order.

The runtime executes a schedule and the simulator times it. A schedule does not contain sends and
receives, which follow from the placement of the stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

from parallel3d.errors import ScheduleError

RECEIVES_AHEAD = 2  # Receives posted ahead of the one that is waited for, per source rank.
# Number of tensors that can be in flight to a rank. Another send first waits for the oldest.
SENDS_KEPT = 4


class Kind(StrEnum):
    """Kind of an action.

    The backward pass of a stage's microbatch is either one action or two halves. Other actions can
    run between the halves to fill the bubble (Qi et al. 2023, arXiv 2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"  # Input and weight gradients.
    INPUT = "I"  # Input gradient, which the previous stage waits for.
    WEIGHT = "W"  # Weight gradients, which no other stage waits for.


class Action(NamedTuple):
    """One stage's work on one microbatch, written `2F0`: stage 2, forward, microbatch 0.

    A named tuple, because a frozen dataclass takes 5 times as long to create.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Actions of each pipeline rank, in order.

    Args:
        name: Name for messages.
        placement: Rank that holds each stage. Consecutive stages can be on the same rank.
        microbatches: Number of microbatches per step.
        ranks: Actions of each rank.
        trains: False if the schedule has forward actions only.

    Example:
        >>> schedule = parallel3d.build_schedule("zb_v", pp=2, microbatches=4, virtual_stages=2)
        >>> schedule.placement, schedule.stages_of(0)
        ((0, 1, 1, 0), [0, 3])
        >>> schedule.peak_live_microbatches
        (4, 4)
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    trains: bool = True

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def splits(self) -> bool:
        """True if any backward pass is split into two halves."""
        return any(action.kind is Kind.INPUT for action in chain.from_iterable(self.ranks))

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a rank in the order of the model."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    @cached_property
    def _takers(self) -> dict[int, Action]:
        """Maps the slot of each result to the action that consumes it."""
        return {self.slots(action)[0]: action for action in chain.from_iterable(self.ranks)}

    def feeds(self, action: Action) -> Action | None:
        """Returns the action that consumes the result of `action`.

        It is the forward pass of the next stage, or the backward pass (full or first half) of the
        previous stage. None for the last stage's forward pass, the first stage's backward pass, and
        weight gradients.
        """
        return self._takers.get(self.slots(action)[1])

    @cached_property
    def transfers(self) -> Mapping[tuple[int, int], Sequence[Action]]:
        """Maps (source rank, target rank) to the messages in the order of sending.

        Each message is listed as the action that consumes it.
        """
        transfers: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        for source, actions in enumerate(self.ranks):
            for taker in filter(None, map(self.feeds, actions)):
                target = self.placement[taker.stage]
                if target != source:
                    transfers[source, target].append(taker)
        return transfers

    def slots(self, action: Action) -> tuple[int, int]:
        """Returns the slot that `action` reads from and the slot that it writes to.

        A slot holds the result of one stage for one microbatch.
        """
        takes, makes = self._first_slots[action.stage, action.kind]
        return takes + action.microbatch, makes + action.microbatch

    @cached_property
    def _first_slots(self) -> dict[tuple[int, Kind], tuple[int, int]]:
        """Slots of microbatch 0. Add m to get those of microbatch m.

        There is one row of slots for each of: the model's input, the outputs of each stage, the
        gradients of each stage's inputs, the gradient of the model's output, and results that no
        action consumes.
        """
        stages = self.stages
        count = self.microbatches
        found = {}
        for stage in range(stages):
            output = (1 + stage) * count
            gradient = (1 + stages + stage) * count
            found[stage, Kind.FORWARD] = (output - count, output)
            found[stage, Kind.BACKWARD] = found[stage, Kind.INPUT] = (gradient + count, gradient)
            # Depends only on an earlier action of its rank, so its input slot is always full.
            found[stage, Kind.WEIGHT] = (0, (2 + 2 * stages) * count)
        return found

    @property
    def slot_count(self) -> int:
        return (3 + 2 * self.stages) * self.microbatches

    def in_order(self) -> Iterator[tuple[int, Action, int, int]]:
        """Yields (rank, action, input slot, output slot), each action after those it depends on.

        Raises ScheduleError if ranks wait for each other. The error names the next action of each
        such rank and the action that it waits for.
        """
        given = b"\1" * self.microbatches
        there = bytearray(given + bytes(2 * self.stages * self.microbatches) + given + given)
        position = [0] * len(self.ranks)
        waiting: dict[int, int] = {}  # slot -> rank that waits for it
        ready = list(reversed(range(len(self.ranks))))
        first_slots = self._first_slots  # As in `slots`, without a call for each action.
        while ready:
            rank = ready.pop()
            actions = self.ranks[rank]
            for at in range(position[rank], len(actions)):
                action = actions[at]
                stage, kind, microbatch = action
                takes, makes = first_slots[stage, kind]
                takes += microbatch
                makes += microbatch
                if not there[takes]:
                    waiting[takes] = rank
                    break
                yield rank, action, takes, makes
                position[rank] = at + 1
                there[makes] = 1
                if makes in waiting:
                    ready.append(waiting.pop(makes))
        if not waiting:
            return
        makers = {self.slots(action)[1]: action for action in chain.from_iterable(self.ranks)}
        stuck = []
        for takes, rank in sorted(waiting.items(), key=lambda each: each[1]):
            action = self.ranks[rank][position[rank]]
            stuck.append(f"rank {rank} at {action} waits for {makers[takes]}")
        raise ScheduleError(f"schedule {self.name} deadlocks: {'; '.join(stuck)}")

    @cached_property
    def _postable(self) -> dict[int, Mapping[Action, int]]:
        """Cache of `postable_after`, keyed by rank."""
        return {}

    def postable_after(self, rank: int) -> Mapping[Action, int]:
        """Returns how many actions of `rank` must be issued before each receive can be posted.

        A receive is keyed by the action that consumes it. The counted actions are those on which
        the received data depends. A receive that is posted earlier can deadlock on a device that
        processes its queue in order.
        """
        if rank not in self._postable:
            found = {}
            # Number of the rank's own actions that precede the latest action of each other rank,
            # and that precede each result.
            before = [0] * len(self.ranks)
            before_slot: dict[int, int] = {}
            for holder, action, takes, makes in self.in_order():
                taken = before_slot.get(takes, 0)
                if holder == rank:
                    before[rank] += 1
                    found[action] = taken
                else:
                    before[holder] = max(before[holder], taken)
                before_slot[makes] = before[holder]
            self._postable[rank] = found
        return self._postable[rank]

    def first_of_each_kind(self, rank: int) -> Schedule:
        """Returns the schedule reduced to the microbatches that a warm-up of `rank` needs.

        These are the microbatches with the first action of each kind on each stage. More than one
        may be needed, because a stage can have both full and split backward passes.
        """
        # Iterating in reverse keeps the earliest microbatch.
        first = {(stage, kind): m for stage, kind, m in reversed(self.ranks[rank])}
        few = set(first.values())
        ranks = []
        for actions in self.ranks:
            ranks.append(tuple(action for action in actions if action.microbatch in few))
        return replace(self, ranks=tuple(ranks))

    @cached_property
    def last_backwards(self) -> frozenset[Action]:
        """Last action of each stage that adds to its weight gradients."""
        ending = (Kind.BACKWARD, Kind.WEIGHT)
        last = {a.stage: a for a in chain.from_iterable(self.ranks) if a.kind in ending}
        return frozenset(last.values())

    @cached_property
    def peak_live_microbatches(self) -> tuple[int, ...]:
        """Result of `peak_live` for each rank."""
        return tuple(map(peak_live, self.ranks))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def peak_live(actions: Iterable[Action]) -> int:
    """Returns the peak number of a rank's microbatches that await their backward action, B or W."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
    changes = [change[action.kind] for action in actions]
    return max(accumulate(changes, initial=0))

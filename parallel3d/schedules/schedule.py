"""A pipeline schedule as plain data: for each pipeline rank, the forwards and backwards that it
does, in order.

The runtime executes it and the simulator times it. Sends and receives are not part of it, because
they follow from which rank holds which stage. No torch here.
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
    stages count from 0, and two in a row may stand on one rank.

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
    trains: bool = True  # False where there are forwards alone

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is done in two halves."""
        return any(action.kind is Kind.INPUT for action in chain.from_iterable(self.ranks))

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages on a rank, in the order of the model."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    @cached_property
    def _takers(self) -> dict[int, Action]:
        """A slot -> the action that takes its result."""
        return {self.slots(action)[0]: action for action in chain.from_iterable(self.ranks)}

    def feeds(self, action: Action) -> Action | None:
        """Returns the action, on any rank, that takes what `action` makes: the next stage's
        forward, or the backward of the stage before, full or split as the schedule has it.
        Returns None at the ends of the pipeline, and for the weights' gradients, which stay
        where they are."""
        return self._takers.get(self.slots(action)[1])

    @cached_property
    def transfers(self) -> Mapping[tuple[int, int], Sequence[Action]]:
        """What is sent from each (source rank, target rank), in the source's order; an item is the
        action that takes it."""
        transfers: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        for source, actions in enumerate(self.ranks):
            for taker in filter(None, map(self.feeds, actions)):
                target = self.placement[taker.stage]
                if target != source:
                    transfers[source, target].append(taker)
        return transfers

    def slots(self, action: Action) -> tuple[int, int]:
        """Returns the slots of two results: the one that `action` takes from another stage, and the
        one that it makes."""
        takes, makes = self._first_slots[action.stage, action.kind]
        return takes + action.microbatch, makes + action.microbatch

    @cached_property
    def _first_slots(self) -> dict[tuple[int, Kind], tuple[int, int]]:
        """What `slots` returns for microbatch 0. Rows of one slot a microbatch are the model's own
        input, the outputs of all stages, the gradients of their inputs, that of the model's output,
        and what no action takes."""
        stages = self.stages
        count = self.microbatches
        found = {}
        for stage in range(stages):
            output = (1 + stage) * count
            gradient = (1 + stages + stage) * count
            found[stage, Kind.FORWARD] = (output - count, output)
            found[stage, Kind.BACKWARD] = found[stage, Kind.INPUT] = (gradient + count, gradient)
            # its first half is an earlier action of the same rank
            found[stage, Kind.WEIGHT] = (0, (2 + 2 * stages) * count)
        return found

    @property
    def slot_count(self) -> int:
        return (3 + 2 * self.stages) * self.microbatches

    def in_order(self) -> Iterator[tuple[int, Action, int, int]]:
        """Yields (rank, action, slot that it takes, slot that it makes) for all actions of a
        complete schedule, each after the actions that it needs. Raises ScheduleError if no such
        order exists, naming where each rank stands and what it waits for."""
        given = b"\1" * self.microbatches
        there = bytearray(given + bytes(2 * self.stages * self.microbatches) + given + given)
        position = [0] * len(self.ranks)
        waiting: dict[int, int] = {}  # a slot -> the rank that waits for it
        ready = list(reversed(range(len(self.ranks))))
        while ready:
            rank = ready.pop()
            actions = self.ranks[rank]
            for at in range(position[rank], len(actions)):
                action = actions[at]
                takes, makes = self.slots(action)
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
        raise ScheduleError(f"schedule {self.name} stops before its end: {'; '.join(stuck)}")

    @cached_property
    def _postable(self) -> dict[int, Mapping[Action, int]]:
        """What `postable_after` has returned, by rank."""
        return {}

    def postable_after(self, rank: int) -> Mapping[Action, int]:
        """Returns, for each action of `rank`, how many of this rank's own actions must have been
        issued before that which it takes can come: the data follows from them, whatever way it
        takes over other ranks. A receive that is posted earlier would stand in the way of its own
        cause wherever a device works off what it was given before it takes more. It is found once,
        in one pass over the schedule."""
        if rank not in self._postable:
            found = {}
            # How many of the rank's own actions come before all that another rank has done so far,
            # and before each result.
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
        """Returns the schedule of a few of the microbatches, in which each stage of a rank does
        every kind of action that it does in the whole one (a stage may have some backwards whole
        and others in halves)."""
        # An earlier action replaces a later one.
        first = {(stage, kind): m for stage, kind, m in reversed(self.ranks[rank])}
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
        """`peak_live` of each rank."""
        return tuple(map(peak_live, self.ranks))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def peak_live(actions: Iterable[Action]) -> int:
    """Returns the most forwards, each of one stage, whose activations wait on a rank at once for
    their backward, or for its second half if the backward is split."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
    changes = [change[action.kind] for action in actions]
    return max(accumulate(changes, initial=0))

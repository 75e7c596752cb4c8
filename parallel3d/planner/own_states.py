"""What a rank of a pipeline has at hand when each of its actions begins, read off the schedule itself: how many forwards
wait for their backward, which stages have gradients, whose parameters a forward has left gathered, how many activations
are being received and sent. Bytes are none of this file's business (`own_memory`), and states that another exceeds in
everything are left out: of thousands of actions a few are left.

Stages of a rank that hold as much (`alike`) are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from parallel3d.config import ScheduleName
from parallel3d.pipeline.schedule import Action, Kind
from parallel3d.pipeline.schedules import placement, rank_actions
from parallel3d.pipeline.schedules_classic import groups
from parallel3d.planner.own_traffic import Traffic

Counts = tuple[int, ...]  # for each kind of stage

# What the stage itself had before: nothing; a forward; a backward (and no forward after it).
Had = Literal["nothing", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class State:
    """Before an action. Counts include the stage of the action, and a backward's own forward is `alive`."""

    kind: Kind
    stage: int  # of the rank's own, from 0
    had: Had
    has_gradients: bool  # of its weights
    is_last: bool  # its gradients are complete when it ends
    alive: Counts  # forwards without a backward
    put_off: Counts  # second halves of backwards
    after_forward: Counts  # stages whose last action was a forward
    after_backward: Counts  # and those where it was a backward, not the last
    whole: Counts  # stages that have had a backward, not the last
    done: Counts  # and those whose gradients are complete
    waiting: int  # activations and gradients between stages, beside the inputs of what is alive

    def exceeds(self, other: State) -> bool:
        """Of the same action: whether it holds as much or more of everything."""
        return (
            self.has_gradients >= other.has_gradients
            and self.waiting >= other.waiting
            and all(map(_at_least, self._held, other._held))
        )

    @property
    def action(self) -> tuple[object, ...]:
        return (self.kind, self.stage, self.had, self.is_last)

    @property
    def _held(self) -> tuple[Counts, ...]:
        begun = tuple(map(sum, zip(self.after_forward, self.after_backward, strict=True)))
        reduced = tuple(map(sum, zip(self.whole, self.done, strict=True)))
        return (self.alive, self.put_off, self.after_forward, begun, self.whole, reduced)


def _at_least(some: Counts, others: Counts) -> bool:
    return all(a >= b for a, b in zip(some, others, strict=True))


@dataclass(frozen=True, slots=True)
class Walk:
    """`frees_each`: parameters are freed after each backward, so that it matters what came last."""

    schedule: str
    pp: int
    rank: int
    microbatches: int
    virtual_stages: int
    alike: tuple[int, ...]  # kind of each of the rank's stages
    frees_each: bool = False


@lru_cache(maxsize=4096)
def fullest_states(walk: Walk) -> tuple[State, ...]:
    """Those that no other of the same action exceeds."""
    found: dict[tuple[object, ...], list[State]] = {}
    for state in states(walk):
        others = found.setdefault(state.action, [])
        if not any(other.exceeds(state) for other in others):
            others[:] = [other for other in others if not state.exceeds(other)]
            others.append(state)
    return tuple(state for some in found.values() for state in some)


def states(walk: Walk) -> Iterator[State]:
    """Before each action of the rank, in order."""
    name = cast(ScheduleName, walk.schedule)
    count = enough_microbatches(name, walk.pp, walk.microbatches)
    numbers = {"pp": walk.pp, "microbatches": count, "virtual_stages": walk.virtual_stages}
    actions = rank_actions(name, rank=walk.rank, **numbers)
    holders = placement(name, pp=walk.pp, virtual_stages=walk.virtual_stages)
    own = [stage for stage, holder in enumerate(holders) if holder == walk.rank]
    sources = _neighbours(holders, walk.rank)
    traffic = Traffic(
        holders, walk.rank, {source: rank_actions(name, rank=source, **numbers) for source in sources}
    )
    yield from _Walker(walk, actions, own, traffic).states()


def enough_microbatches(name: ScheduleName, pp: int, microbatches: int) -> int:
    """So few as hold as much: the others are the same again."""
    first = groups(pp, microbatches)[0]
    few = {
        "1f1b": pp + 2,
        "zb_h1": 2 * pp + 2,
        "naive": 2,
        "zb_v": 4 * pp,
        "dualpipe_v": 4 * pp,
    }.get(name, microbatches)
    if name in ("interleaved_1f1b", "interleaved_zb") and groups(pp, 3 * first) == [first] * 3:
        few = 3 * first
    return min(microbatches, few)


def _neighbours(holders: tuple[int, ...], rank: int) -> set[int]:
    pairs = list(zip(holders[:-1], holders[1:], strict=True))
    before, after = ({a for a, b in pairs if b == rank}, {b for a, b in pairs if a == rank})
    return (before | after) - {rank}


class _Walker:
    def __init__(self, walk: Walk, actions: tuple[Action, ...], own: list[int], traffic: Traffic) -> None:
        self._walk, self._actions, self._traffic = walk, actions, traffic
        self._place = {stage: at for at, stage in enumerate(own)}
        kinds = max(walk.alike, default=0) + 1
        self._counts = {
            name: [0] * kinds for name in ("alive", "put_off", "after_forward", "after_backward", "whole", "done")
        }
        self._had: list[Had] = ["nothing"] * len(own)
        self._has_gradients = [False] * len(own)
        ends = {action.stage: action for action in actions if action.kind in (Kind.BACKWARD, Kind.WEIGHT)}
        self._lasts = set(ends.values())

    def states(self) -> Iterator[State]:
        walk, traffic = self._walk, self._traffic
        for action in self._actions:
            at = self._place[action.stage]
            traffic.take(action)
            yield State(
                kind=action.kind,
                stage=at,
                had=self._had[at],
                has_gradients=self._has_gradients[at],
                is_last=action in self._lasts,
                waiting=traffic.waiting,
                **{name: tuple(counts) for name, counts in self._counts.items()},
            )
            self._do(action, at, walk.alike[at])
            traffic.give(action)

    def _do(self, action: Action, at: int, kind: int) -> None:
        counts = self._counts
        if action.kind is Kind.FORWARD:
            counts["alive"][kind] += 1
            self._see(at, kind, "forward")
            return
        if action.kind is Kind.WEIGHT:
            counts["put_off"][kind] -= 1
        else:
            counts["alive"][kind] -= 1
            self._see(at, kind, "backward" if self._walk.frees_each else "forward")
        if action.kind is Kind.INPUT:
            counts["put_off"][kind] += 1
        elif not self._has_gradients[at]:
            self._has_gradients[at] = True
            counts["whole"][kind] += 1
        if action in self._lasts:
            counts["whole"][kind] -= 1
            counts["done"][kind] += 1
            self._see(at, kind, "nothing")

    def _see(self, at: int, kind: int, now: Had) -> None:
        """What the stage had last."""
        for had, step in ((self._had[at], -1), (now, 1)):
            if had != "nothing":
                self._counts[f"after_{had}"][kind] += step
        self._had[at] = now

"""What a rank of a pipeline has at hand when each of its actions begins, read off the schedule itself: how many
forwards wait for their backward, which stages have gradients, whose parameters a forward has left gathered, how many
activations are being received and sent. Bytes are none of this file's business (`own/memory`).

Stages of a rank that hold as much (`alike`) are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast, get_args

from parallel3d.planner.own.traffic import Traffic
from parallel3d.schedules.builders import placement, rank_actions
from parallel3d.schedules.classic import groups
from parallel3d.schedules.registry import ScheduleName
from parallel3d.schedules.schedule import Action, Kind

Counts = tuple[int, ...]  # for each kind of stage

# What the stage itself had before: nothing; a forward; a backward (and no forward after it).
Had = Literal["nothing", "forward", "backward"]


class State(NamedTuple):
    """Before an action. `counts`, of each kind of stage one after the other, include the action's own stage, and a
    backward's own forward:

        alive             forwards without a backward
        put_off           second halves of backwards
        after_forward     stages whose last action was a forward
        after_backward    and those where it was a backward, not the last
        whole             stages that have had a backward, not the last
        done              and those whose gradients are complete
        halved            stages that have had first halves of backwards alone
        waiting           (one number) activations and gradients between stages, beside the inputs of what is alive
    """

    kind: Kind
    stage: int  # of the rank's own, from 0
    had: Had
    has_gradients: bool  # of its weights
    has_half: bool  # or what a first half gives
    is_last: bool  # its gradients are complete when it ends
    counts: Counts

    @property
    def waiting(self) -> int:
        return self.counts[-1]

    def of(self, name: Tally) -> Counts:
        kinds = len(self.counts) // len(TALLIES)
        at = TALLIES.index(name) * kinds
        return self.counts[at : at + kinds]


Tally = Literal["alive", "put_off", "after_forward", "after_backward", "whole", "done", "halved"]
TALLIES: tuple[Tally, ...] = get_args(Tally)


@dataclass(frozen=True, slots=True)
class Walk:
    """`frees_each`: parameters are freed after each backward, so that it matters what came last. `keeps_gradients`:
    the second half of a backward needs the gradient that the first has taken."""

    schedule: str
    pp: int
    rank: int
    microbatches: int
    virtual_stages: int
    alike: tuple[int, ...]  # kind of each of the rank's stages
    frees_each: bool = False
    keeps_gradients: bool = False


@lru_cache(maxsize=8192)
def fullest_states(walk: Walk) -> tuple[tuple[State, ...], ...]:
    """Those that differ in counts alone together, and of them a few: that which has most forwards alive, of all stages
    and of each kind of stage, the most put off, and the most gradients. What a state holds is a sum of its counts, each
    times some bytes; and where one kind of stage has more alive, another has so many fewer."""
    kinds = max(walk.alike, default=0) + 1
    found: dict[tuple[object, ...], dict[int, tuple[tuple[int, ...], State]]] = {}
    for state in dict.fromkeys(states(walk)):
        counts = state.counts
        alive, put_off = sum(counts[:kinds]), sum(counts[kinds : 2 * kinds])
        gradients = sum(counts[4 * kinds : 5 * kinds])
        rest = (gradients, sum(counts[2 * kinds : 4 * kinds]), sum(counts[5 * kinds :]))
        ways = [(alive + put_off, alive, *rest), (alive, put_off, *rest), (put_off, alive, *rest)]
        ways.append((gradients, alive + put_off, *rest))
        if kinds > 1:
            ways += [(counts[kind], alive + put_off, *rest) for kind in range(kinds)]
        most = found.setdefault((walk.alike[state.stage], state.kind, *state[2:-1]), {})
        for at, way in enumerate(ways):
            if at not in most or way > most[at][0]:
                most[at] = (way, state)
    return tuple(tuple({state for _, state in most.values()}) for most in found.values())


def states(walk: Walk) -> Iterator[State]:
    """Before each action of the rank, in order."""
    yield from _walker(walk).states()


@lru_cache(maxsize=8192)
def received_into(walk: Walk) -> int:
    """Tensors that the rank has at last to receive others into."""
    return _walker(walk).received()


def _walker(walk: Walk) -> _Walker:
    name = cast(ScheduleName, walk.schedule)
    count = enough_microbatches(name, walk.pp, walk.microbatches)
    actions = rank_actions(name, pp=walk.pp, rank=walk.rank, microbatches=count, virtual_stages=walk.virtual_stages)
    holders = placement(name, pp=walk.pp, virtual_stages=walk.virtual_stages)
    own = [stage for stage, holder in enumerate(holders) if holder == walk.rank]
    return _Walker(walk, actions, own, Traffic(holders, walk.rank, actions, keeps_gradients=walk.keeps_gradients))


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
    if name in ("interleaved_1f1b", "interleaved_zb") and groups(pp, 2 * first) == [first] * 2:
        few = 2 * first
    return min(microbatches, few)


class _Walker:
    def __init__(self, walk: Walk, actions: tuple[Action, ...], own: list[int], traffic: Traffic) -> None:
        self._walk, self._actions, self._traffic = walk, actions, traffic
        self._place = {stage: at for at, stage in enumerate(own)}
        self._kinds = max(walk.alike, default=0) + 1
        self._counts = [0] * (self._kinds * len(TALLIES))
        self._had: list[Had] = ["nothing"] * len(own)
        self._has_gradients, self._has_half = [False] * len(own), [False] * len(own)
        ends = {action.stage: action for action in actions if action.kind in (Kind.BACKWARD, Kind.WEIGHT)}
        self._lasts = set(ends.values())

    def states(self) -> Iterator[State]:
        walk, traffic = self._walk, self._traffic
        for action in self._actions:
            at, is_last = self._place[action.stage], action in self._lasts
            traffic.take(action)
            counts = (*self._counts, traffic.waiting)
            has = self._has_gradients[at], self._has_half[at]
            yield State(action.kind, at, self._had[at], *has, is_last, counts)
            self._do(action, at, walk.alike[at], is_last)
            traffic.give(action)

    def received(self) -> int:
        for action in self._actions:
            self._traffic.take(action)
            self._traffic.give(action)
        return self._traffic.received

    def _do(self, action: Action, at: int, kind: int, is_last: bool) -> None:
        if action.kind is Kind.FORWARD:
            self._add("alive", kind, 1)
            self._see(at, kind, "forward")
            return
        if action.kind is Kind.WEIGHT:
            self._add("put_off", kind, -1)
        else:
            self._add("alive", kind, -1)
            self._see(at, kind, "backward" if self._walk.frees_each else "forward")
        if action.kind is Kind.INPUT:
            self._add("put_off", kind, 1)
            if not self._has_half[at]:
                self._has_half[at] = True
                self._add("halved", kind, 1)
        elif not self._has_gradients[at]:
            self._add("halved", kind, -self._has_half[at])
            self._has_gradients[at] = self._has_half[at] = True
            self._add("whole", kind, 1)
        if is_last:
            self._add("whole", kind, -1)
            self._add("done", kind, 1)
            self._see(at, kind, "nothing")

    def _see(self, at: int, kind: int, now: Had) -> None:
        """What the stage had last."""
        had = self._had[at]
        if had != now:
            if had != "nothing":
                self._add("after_forward" if had == "forward" else "after_backward", kind, -1)
            if now != "nothing":
                self._add("after_forward" if now == "forward" else "after_backward", kind, 1)
            self._had[at] = now

    def _add(self, name: Tally, kind: int, more: int) -> None:
        self._counts[_PLACES[name] * self._kinds + kind] += more


_PLACES = {name: at for at, name in enumerate(TALLIES)}

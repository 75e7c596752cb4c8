"""What a pipeline rank has at hand when each of its actions begins, counted from the schedule that is executed:
forwards that wait for their backward, stages with gradients or gathered parameters, activations between stages.

Stages of a rank that hold as many bytes are of one kind, and are counted together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

from parallel3d.schedules.build import placement, rank_actions
from parallel3d.schedules.classic import groups
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Action, Kind

LastDone = Literal["nothing", "forward", "backward"]  # "backward" only where parameters are freed after each
Gradients = Literal["none", "half", "whole", "complete"]  # "half": what the first halves of split backwards give
TALLIES = 7  # counts of a kind of stage in `BeforeAction.counts`


class BeforeAction(NamedTuple):
    """Before an action of a stage. `counts` has, of one kind of stage after the other, seven numbers: forwards without
    a backward; delayed second halves; stages whose last action was a forward; stages where it was a backward; stages
    with whole gradients; with complete ones; with those of first halves alone. The action's own stage is counted."""

    kind: Kind
    stage: int  # an index of the rank's own stages, from 0
    last_done: LastDone
    gradients: Gradients
    is_last: bool  # the stage's gradients are complete when the action ends
    counts: tuple[int, ...]
    in_flight: int  # activations and gradients between stages, beside the inputs of forwards that wait

    def tally(self, which: int) -> tuple[int, ...]:
        """Returns the number at `which` of each kind of stage."""
        return self.counts[which::TALLIES]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """What decides the counts of a rank: `kinds` has the kind of each of its stages."""

    name: str
    pp: int
    rank: int
    microbatches: int
    virtual_stages: int
    kinds: tuple[int, ...]
    frees_each: bool = False  # parameters are freed after each backward, so that it matters what came last
    keeps_gradients: bool = False  # second halves of backwards need the gradients that the first halves have taken


@lru_cache(maxsize=8192)
def grouped_moments(schedule: RankSchedule) -> tuple[tuple[tuple[BeforeAction, ...], ...], int]:
    """Returns groups of moments, and the tensors that the rank has at last to receive others into. The moments of a
    group differ in their counts alone, and no two moments are the same."""
    moments, received = _moments(schedule)
    groups: dict[tuple[object, ...], list[BeforeAction]] = {}
    for moment in dict.fromkeys(moments):
        groups.setdefault((moment.kind, schedule.kinds[moment.stage], *moment[2:5]), []).append(moment)
    return tuple(map(tuple, groups.values())), received


@dataclass(slots=True)
class _StageProgress:
    alive: int = 0
    delayed: int = 0
    last_done: LastDone = "nothing"
    gradients: Gradients = "none"

    def counts(self) -> tuple[int, ...]:
        done, has = self.last_done, self.gradients
        stages = (done == "forward", done == "backward", has == "whole", has == "complete", has == "half")
        return (self.alive, self.delayed, *map(int, stages))

    def do(self, kind: Kind, *, is_last: bool, frees_each: bool) -> None:
        if kind is Kind.FORWARD:
            self.alive, self.last_done = self.alive + 1, "forward"
            return
        if kind is Kind.WEIGHT:
            self.delayed -= 1
        else:
            self.alive, self.last_done = self.alive - 1, "backward" if frees_each else "forward"
        if kind is Kind.INPUT:
            self.delayed += 1
            self.gradients = "half" if self.gradients == "none" else self.gradients
        else:
            self.gradients = "whole"
        if is_last:
            self.gradients, self.last_done = "complete", "nothing"


def _moments(schedule: RankSchedule) -> tuple[list[BeforeAction], int]:
    """Before each action of the rank, and the tensors that it has at last to receive into."""
    name, rank = cast(ScheduleName, schedule.name), schedule.rank
    sizes = {"pp": schedule.pp, "virtual_stages": schedule.virtual_stages}
    microbatches = _enough_microbatches(schedule)
    actions = rank_actions(name, rank=rank, microbatches=microbatches, **sizes)
    holders = placement(name, **sizes)
    own = [stage for stage, holder in enumerate(holders) if holder == rank]
    stages = {stage: _StageProgress() for stage in own}
    by_kind: list[list[_StageProgress]] = [[] for _ in range(max(schedule.kinds, default=0) + 1)]
    for stage, kind in zip(own, schedule.kinds, strict=True):
        by_kind[kind].append(stages[stage])
    lasts = set({action.stage: action for action in actions if action.kind in (Kind.BACKWARD, Kind.WEIGHT)}.values())
    transfers = _Transfers(holders, rank, actions, keeps_gradients=schedule.keeps_gradients)
    found = []
    for action in actions:
        acting, is_last = stages[action.stage], action in lasts
        transfers.take(action)
        counts = tuple(sum(each) for kind in by_kind for each in zip(*(one.counts() for one in kind), strict=True))
        before = (action.kind, own.index(action.stage), acting.last_done, acting.gradients, is_last)
        found.append(BeforeAction(*before, counts, transfers.in_flight))
        acting.do(action.kind, is_last=is_last, frees_each=schedule.frees_each)
        transfers.give(action)
    return found, transfers.pool


def _enough_microbatches(schedule: RankSchedule) -> int:
    """So few as hold as much: the others are the same again."""
    traits, pp, microbatches = schedule_traits(schedule.name), schedule.pp, schedule.microbatches
    if traits.holds_whole_batch:
        return microbatches
    if traits.stages.v_shaped or schedule.virtual_stages == 1:
        return min(microbatches, (4 if traits.stages.v_shaped else 2) * pp + 2)
    first = groups(pp, microbatches)[0]
    return min(microbatches, 2 * first) if groups(pp, 2 * first) == [first] * 2 else microbatches


class _Transfers:
    """Tensors between the stages of a rank and others, as `pipeline.transport` has them: it receives ahead into memory
    that it uses again and never gives back, and keeps what it has sent for a while."""

    def __init__(
        self, holders: tuple[int, ...], rank: int, actions: tuple[Action, ...], *, keeps_gradients: bool
    ) -> None:
        self._holders, self._rank, self._keeps_gradients = holders, rank, keeps_gradients
        sources = [self._source(action) for action in actions]
        self._unposted = Counter(source for source in sources if source is not None and source != rank)
        self._posted: Counter[int] = Counter()
        self._in_use = 0  # tensors of the pool that are posted, or a stage has
        self.pool = 0
        self._waiting = 0  # tensors of the pool that are inputs of forwards and gradients of delayed second halves
        self._sent: Counter[int] = Counter()
        self._handed_over = 0  # between two stages of this rank, or taken by the action from one
        for source in self._unposted:
            self._post(source)

    @property
    def in_flight(self) -> int:
        return self.pool - self._waiting + self._sent.total() + self._handed_over

    def take(self, action: Action) -> None:
        """Counts what an action takes of another stage."""
        source = self._source(action)
        if source is None or source == self._rank:
            self._handed_over -= source == self._rank and action.kind is Kind.FORWARD
            return
        self._posted[source] -= 1
        self._post(source)
        self._waiting += action.kind is Kind.FORWARD

    def give(self, action: Action) -> None:
        """Counts what an action leaves: what it took is free again, what it made is on its way."""
        stage, kind, _ = action
        last, source = len(self._holders) - 1, self._source(action)
        keeps = self._keeps_gradients and stage < last and self._holders[stage + 1] != self._rank
        if kind is Kind.WEIGHT:
            self._waiting -= keeps
            self._in_use -= keeps
            return
        if kind is not Kind.FORWARD:
            if source == self._rank:
                self._handed_over -= 1
            kept = keeps and kind is Kind.INPUT
            self._waiting += kept
            self._in_use -= not kept and source not in (None, self._rank)
            received = stage > 0 and self._holders[stage - 1] != self._rank
            self._in_use -= received
            self._waiting -= received
        target = stage + 1 if kind is Kind.FORWARD else stage - 1
        if 0 <= target <= last and self._holders[target] == self._rank:
            self._handed_over += 1
        elif 0 <= target <= last:
            self._sent[self._holders[target]] = min(self._sent[self._holders[target]] + 1, SENDS_KEPT)

    def _source(self, action: Action) -> int | None:
        """The rank whose stage gives an action what it takes."""
        stage = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        return None if action.kind is Kind.WEIGHT or not 0 <= stage < len(self._holders) else self._holders[stage]

    def _post(self, source: int) -> None:
        more = min(self._unposted[source], RECEIVES_AHEAD + 1 - self._posted[source])
        self._unposted[source] -= more
        self._posted[source] += more
        self._in_use += more
        self.pool = max(self.pool, self._in_use)

"""What a pipeline rank has at hand when each of its actions begins, counted from the schedule that is executed:
forwards that wait for their backward, stages with gradients or gathered parameters, activations between stages."""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedules.build import placement, rank_actions
from parallel3d.schedules.classic import groups as groups_of
from parallel3d.schedules.registry import ScheduleName, schedule_traits
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Kind


class StageProgress(NamedTuple):
    """How far a stage is: forwards without a backward, delayed second halves of backwards, and whether (1 or 0) its
    parameters are gathered, its last action was a backward that freed them, and which of its gradients exist: those of
    first halves of backwards alone, all, or all of them complete."""

    alive: int = 0
    delayed: int = 0
    gathered: int = 0
    freed: int = 0
    halves: int = 0
    whole: int = 0
    complete: int = 0

    def after(self, kind: Kind, *, is_last: bool, frees_each: bool) -> StageProgress:
        """Returns the progress after an action."""
        if kind is Kind.FORWARD:
            return self._replace(alive=self.alive + 1, gathered=1, freed=0)
        if is_last:
            return StageProgress(complete=1)
        if kind is Kind.WEIGHT:
            return self._replace(delayed=self.delayed - 1, halves=0, whole=1)
        is_half = kind is Kind.INPUT
        return StageProgress(
            alive=self.alive - 1,
            delayed=self.delayed + is_half,
            gathered=int(not frees_each),
            freed=int(frees_each),
            halves=int(is_half and not self.whole),
            whole=int(self.whole or not is_half),
        )


class BeforeAction(NamedTuple):
    """Before an action of a stage. `in_flight` counts activations and gradients between stages, beside the inputs of
    forwards that wait."""

    kind: Kind
    stage: int  # an index of the rank's own stages, from 0
    is_last: bool  # the stage's gradients are complete when the action ends
    own: StageProgress  # of this stage, without its counts of microbatches
    stages: tuple[int, ...]  # the progress of one stage after the other
    in_flight: int


@lru_cache(maxsize=8192)
def grouped_moments(
    name: ScheduleName, pp: int, rank: int, microbatches: int, virtual_stages: int, *, frees_each: bool
) -> tuple[tuple[tuple[BeforeAction, ...], ...], int]:
    """Returns groups of moments that differ in what the rank holds of all stages alone, and the tensors that it has at
    last to receive others into (`pipeline.transport`). `frees_each`: parameters are freed after each backward."""
    few = _enough_microbatches(name, pp, microbatches, virtual_stages)
    actions = rank_actions(name, rank=rank, microbatches=few, pp=pp, virtual_stages=virtual_stages)
    holders = placement(name, pp=pp, virtual_stages=virtual_stages)
    own = [stage for stage, holder in enumerate(holders) if holder == rank]
    lasts = set({action.stage: action for action in actions if action.kind in (Kind.BACKWARD, Kind.WEIGHT)}.values())
    borders = [(stage, other) for stage in own for other in (stage - 1, stage + 1) if 0 <= other < len(holders)]
    others = Counter(holders[other] for _, other in borders if holders[other] != rank)  # stages beside those of others
    receiving = [own.index(stage) for stage, other in borders if other < stage and holders[other] != rank]
    pool = receive_buffers(name, pp, rank, few, virtual_stages)
    most_sent = sum(min(SENDS_KEPT, count * microbatches) for count in others.values())
    progress, numbers = [StageProgress()] * len(own), [0] * len(StageProgress._fields) * len(own)
    found, sent = [], 0
    for action in actions:
        at, is_last = own.index(action.stage), action in lasts
        held = sum(progress[stage].alive for stage in receiving)
        before = progress[at]._replace(alive=0, delayed=0)
        found.append((action.kind, at, is_last, before, tuple(numbers), min(sent, most_sent) - held))
        progress[at] = progress[at].after(action.kind, is_last=is_last, frees_each=frees_each)
        numbers[at * len(before) : (at + 1) * len(before)] = progress[at]
        target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        sent += action.kind is not Kind.WEIGHT and 0 <= target < len(holders) and holders[target] != rank
    groups: dict[tuple[object, ...], list[BeforeAction]] = {}
    for moment in dict.fromkeys(found):
        groups.setdefault(moment[:4], []).append(BeforeAction(*moment[:5], moment[5] + pool))
    return tuple(map(tuple, groups.values())), pool


Taker = tuple[int, bool, int]  # the action that takes a message: its stage, whether it is a forward, its microbatch


@lru_cache(maxsize=8192)
def receive_buffers(name: ScheduleName, pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Returns the most tensors that a rank has at once to receive others into: inputs of forwards that wait for their
    backward, what the action under way has taken, and receives that are posted (`pipeline.transport`)."""
    unposted = _messages(name, pp, rank, microbatches, virtual_stages)
    holders = placement(name, pp=pp, virtual_stages=virtual_stages)
    posted: dict[int, deque[Taker]] = {source: deque() for source in unposted}
    arrived: set[Taker] = set()
    most, held = 0, 0

    def post(issued: int) -> None:
        for source, waiting in unposted.items():
            while waiting and len(posted[source]) <= RECEIVES_AHEAD and waiting[0][1] <= issued:
                posted[source].append(waiting.popleft()[0])

    actions = rank_actions(name, rank=rank, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    for issued, (stage, kind, microbatch) in enumerate(actions):
        is_forward, giver = kind is Kind.FORWARD, stage - 1 if kind is Kind.FORWARD else stage + 1
        post(issued)
        if kind is not Kind.WEIGHT and 0 <= giver < len(holders) and holders[giver] != rank:
            while (stage, is_forward, microbatch) not in arrived:
                arrived.add(posted[holders[giver]].popleft())
                post(issued)
        most = max(most, held + len(arrived) + sum(map(len, posted.values())))
        arrived.discard((stage, is_forward, microbatch))
        if kind is not Kind.WEIGHT and stage > 0 and holders[stage - 1] != rank:
            held += 1 if is_forward else -1
    return most


def _messages(
    name: ScheduleName, pp: int, rank: int, microbatches: int, virtual_stages: int
) -> dict[int, deque[tuple[Taker, int]]]:
    """Returns what comes to a rank, by the rank that sends it and in its order, each message with the number of the
    rank's own actions after which it can be posted. It is `Schedule.postable_after`, read off the actions of the rank
    and of those that send to it: to build all ranks would take a plan too long. For every schedule of the registry it
    comes to the same, because what a message follows from over third ranks, it follows from directly too."""
    numbers = {"pp": pp, "microbatches": microbatches, "virtual_stages": virtual_stages}
    holders = placement(name, pp=pp, virtual_stages=virtual_stages)
    own = [stage for stage, holder in enumerate(holders) if holder == rank]
    issued = {  # how many actions of the rank are issued when one of them is
        (stage, kind is Kind.FORWARD, microbatch): at
        for at, (stage, kind, microbatch) in enumerate(rank_actions(name, rank=rank, **numbers), 1)
        if kind is not Kind.WEIGHT
    }
    messages: dict[int, deque[tuple[Taker, int]]] = {}
    for source in {holders[at] for stage in own for at in (stage - 1, stage + 1) if 0 <= at < len(holders)} - {rank}:
        messages[source], after = deque(), 0
        for stage, kind, microbatch in rank_actions(name, rank=source, **numbers):
            is_forward, taker = kind is Kind.FORWARD, stage + 1 if kind is Kind.FORWARD else stage - 1
            # The nearest of the rank's stages through which this microbatch has come to the source.
            causes = [(at, True, microbatch) for at in own if at < stage or not is_forward]
            causes += [(at, False, microbatch) for at in reversed(own) if at > stage and not is_forward]
            if kind is not Kind.WEIGHT and causes:
                after = max(after, issued[causes[-1]])
            if kind is not Kind.WEIGHT and 0 <= taker < len(holders) and holders[taker] == rank:
                messages[source].append(((taker, is_forward, microbatch), after))
    return messages


def _enough_microbatches(name: ScheduleName, pp: int, microbatches: int, virtual_stages: int) -> int:
    """So few as hold as much: the others are the same again."""
    traits = schedule_traits(name)
    if traits.holds_whole_batch:
        return microbatches
    if traits.stages.v_shaped or virtual_stages == 1:
        return min(microbatches, (4 if traits.stages.v_shaped else 2) * pp + 2)
    first = groups_of(pp, microbatches)[0]
    return min(microbatches, 2 * first) if groups_of(pp, 2 * first) == [first] * 2 else microbatches

"""Schedules on a V: rank r holds stage r on the way down and stage 2 pp - 1 - r on the way up, so that a microbatch
ends where it began, and the last rank has two stages in a row. Each rank has two stages; the times F, I, W and B are
those of one stage.
"""

from __future__ import annotations

from collections import Counter, deque

from parallel3d.schedules.classic import Actions
from parallel3d.schedules.schedule import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def zb_v(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders ZB-V (Qi et al. 2024, arXiv 2405.15362; 2023, arXiv 2401.10241, section 6). Where F, I and W are equal, no
    rank is idle between its first and its last action, and at most 2 p forwards of a stage are alive, as much memory as
    1F1B's. Rank r starts r steps late, so the bubble is (p - 1) / (6 m + p - 1) for m >= 2 p - 1. With unequal times an
    order that is fitted to them does better."""
    assert virtual_stages == 2
    return _without_holes(_zb_v_rank(pp, rank, max(2 * pp - 1, microbatches)), microbatches)


def dualpipe_v(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders DualPipe-V (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, halved as in
    github.com/deepseek-ai/DualPipe): forwards of one direction stand next to backwards of the other, so that a rank may
    overlap the communication of one with the compute of the other. 2 p + 1 forwards are alive. Each rank is idle for
    (p - 1) (F&B + B - 3 W), with F&B a pair's time; where a pair's two actions follow each other, as they are written
    here, for (p - 1) (F + I - W) if I <= F. Fewer than 2 p microbatches leave holes.
    """
    assert virtual_stages == 2
    return _without_holes(_dualpipe_v_rank(pp, rank, max(2 * pp, microbatches)), microbatches)


def _without_holes(actions: list[Action], microbatches: int) -> list[Action]:
    """Drops the microbatches that are not there: a schedule without all actions of a microbatch is still a schedule."""
    return [action for action in actions if action.microbatch < microbatches]


class _OrderWriter:
    """Writes down a rank's actions; each kind takes a stage's microbatches in their order."""

    def __init__(self, pp: int, rank: int) -> None:
        self.down, self.up = rank, 2 * pp - 1 - rank
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._unweighted: deque[tuple[int, int]] = deque()  # stages and microbatches whose I waits for its W

    def do(self, *work: tuple[int, Kind]) -> None:
        for stage, kind in work:
            at = (stage, F if kind is F else B)  # I and B take from one row of microbatches
            microbatch = self._next[at]
            self._next[at] += 1
            self.actions.append(Action(stage, kind, microbatch))
            if kind is I:
                self._unweighted.append((stage, microbatch))

    def weigh(self, stage: int | None = None) -> None:
        """Adds the oldest W that is left, or the oldest one of `stage`; adds nothing if no W is left."""
        found = next((each for each in self._unweighted if stage is None or each[0] == stage), None)
        if found is not None:
            self._unweighted.remove(found)
            self.actions.append(Action(found[0], W, found[1]))

    def count(self, stage: int) -> int:
        """Counts the forwards of a stage that are written down."""
        return self._next[stage, F]


def _zb_v_rank(pp: int, rank: int, microbatches: int) -> list[Action]:
    """Writes the order of torch.distributed.pipelining's ScheduleZBVZeroBubble."""
    it = _OrderWriter(pp, rank)
    down, up = it.down, it.up

    def backward(stage: int) -> None:
        it.do((stage, I))
        it.weigh(stage)

    it.do(*[(down, F)] * (2 * (pp - rank) - 1))
    it.do(*[(up, F), (down, F)] * rank)
    for _ in range(pp - rank):
        it.do((up, F))
        backward(up)
    while it.count(up) < it.count(down) or it.count(down) < microbatches:
        if it.count(down) < microbatches:
            it.do((down, F))
        backward(down)
        it.do((up, F))
        backward(up)
    it.do(*[(down, I), (up, I)] * rank)
    for _ in range(pp - rank):
        backward(down)
    for stage in (up, down):
        for _ in range(rank):
            it.weigh(stage)
    return it.actions


def _dualpipe_v_rank(pp: int, rank: int, microbatches: int) -> list[Action]:
    """Writes the eight steps of DeepSeek's code; where it overlaps a pair, the forward comes before the backward."""
    it = _OrderWriter(pp, rank)
    down, up, behind = it.down, it.up, pp - rank - 1
    it.do(*[(down, F)] * (2 * behind))
    it.do(*[(down, F), (up, F)] * (rank + 1))
    for _ in range(behind):
        it.do((up, I))
        it.weigh()
        it.do((up, F))
    it.do(*[(down, F), (up, B), (up, F), (down, B)] * (microbatches - 2 * pp + rank + 1))
    it.do(*[(up, B), (up, F), (down, B)] * behind)
    tail = [stage for _ in range(rank + 1) for stage in (up, down)]
    it.do(*[(stage, B) for stage in tail[: rank + 1]])
    it.do(*[(stage, I) for stage in tail[rank + 1 :]])  # their W fill the way out
    for _ in range(behind):
        it.weigh()
        it.do((down, I))
    for _ in range(rank + 1):
        it.weigh()
    return it.actions

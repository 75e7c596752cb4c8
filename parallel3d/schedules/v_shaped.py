"""Schedules on a V: rank r holds stage r on the way down and stage 2 pp - 1 - r on the way up, so
that a microbatch ends where it began, and the last rank has two stages in a row. Each rank has two
stages; the times F, I, W and B are those of one stage. Fewer microbatches than an order needs are
left out of it: a schedule without all actions of a microbatch is still a schedule.
"""

from __future__ import annotations

from collections import Counter, deque

from parallel3d.schedules.classic import Actions
from parallel3d.schedules.schedule import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def zb_v(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders ZB-V (Qi et al. 2024, arXiv 2405.15362; 2023, arXiv 2401.10241, section 6), as
    ScheduleZBVZeroBubble of torch.distributed.pipelining does. Where F, I and W are equal, no rank
    is idle between its first and its last action, and at most 2 p forwards of a stage are alive, as
    much memory as 1F1B's. Rank r starts r steps late, so the bubble is (p - 1) / (6 m + p - 1) for
    m >= 2 p - 1. With unequal times an order that is fitted to them does better.
    """
    down, up, planned = rank, 2 * pp - 1 - rank, max(2 * pp - 1, microbatches)
    order = _OrderWriter()

    def backward(stage: int) -> None:
        order.do((stage, I))
        order.weigh(stage)

    order.do(*[(down, F)] * (2 * (pp - rank) - 1))
    order.do(*[(up, F), (down, F)] * rank)
    for _ in range(pp - rank):
        order.do((up, F))
        backward(up)
    while order.forwards(up) < order.forwards(down) or order.forwards(down) < planned:
        if order.forwards(down) < planned:
            order.do((down, F))
        backward(down)
        order.do((up, F))
        backward(up)
    order.do(*[(down, I), (up, I)] * rank)
    for _ in range(pp - rank):
        backward(down)
    for stage in (up, down):
        for _ in range(rank):
            order.weigh(stage)
    return [action for action in order.actions if action.microbatch < microbatches]


def dualpipe_v(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders DualPipe-V (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, halved as in
    github.com/deepseek-ai/DualPipe, whose eight steps these are): forwards of one direction stand
    next to backwards of the other, so that a rank may overlap the communication of one with the
    compute of the other. 2 p + 1 forwards are alive. Each rank is idle for (p - 1) (F&B + B - 3 W),
    with F&B a pair's time; where a pair's two actions follow each other, as they are written here,
    forward first, for (p - 1) (F + I - W) if I <= F. Fewer than 2 p microbatches leave holes.
    """
    down, up, behind, planned = rank, 2 * pp - 1 - rank, pp - rank - 1, max(2 * pp, microbatches)
    order = _OrderWriter()
    order.do(*[(down, F)] * (2 * behind))
    order.do(*[(down, F), (up, F)] * (rank + 1))
    for _ in range(behind):
        order.do((up, I))
        order.weigh()
        order.do((up, F))
    order.do(*[(down, F), (up, B), (up, F), (down, B)] * (planned - 2 * pp + rank + 1))
    order.do(*[(up, B), (up, F), (down, B)] * behind)
    tail = [stage for _ in range(rank + 1) for stage in (up, down)]
    order.do(*[(stage, B) for stage in tail[: rank + 1]])
    order.do(*[(stage, I) for stage in tail[rank + 1 :]])  # their W fill the way out
    for _ in range(behind):
        order.weigh()
        order.do((down, I))
    for _ in range(rank + 1):
        order.weigh()
    return [action for action in order.actions if action.microbatch < microbatches]


class _OrderWriter:
    """Writes down a rank's actions; each kind takes a stage's microbatches in their order."""

    def __init__(self) -> None:
        self.actions: Actions = []
        self._next: Counter[tuple[int, Kind]] = Counter()
        # stages and microbatches whose I waits for its W
        self._unweighted: deque[tuple[int, int]] = deque()

    def do(self, *work: tuple[int, Kind]) -> None:
        for stage, kind in work:
            at = (stage, F if kind is F else B)  # I and B take from one row of microbatches
            self.actions.append(Action(stage, kind, self._next[at]))
            if kind is I:
                self._unweighted.append((stage, self._next[at]))
            self._next[at] += 1

    def weigh(self, stage: int | None = None) -> None:
        """Adds the oldest W that is left, or the oldest one of `stage`; adds nothing if no W is
        left."""
        found = next((each for each in self._unweighted if stage is None or each[0] == stage), None)
        if found is not None:
            self._unweighted.remove(found)
            self.actions.append(Action(found[0], W, found[1]))

    def forwards(self, stage: int) -> int:
        """Counts the forwards of a stage that are written down."""
        return self._next[stage, F]

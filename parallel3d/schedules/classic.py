"""Schedules whose stages go round the ranks: naive, GPipe, 1F1B, breadth-first and the two ZB-H1.

Each builder is a pure function of (pipeline ranks, rank, microbatches, stages per rank) that
returns a rank's actions; 1F1B, interleaved 1F1B and ZB-H1 are given by the warm-ups of `in_turn`.
Stage s stands on rank s mod pp. In the formulas p is pp, m the microbatches, v the stages per rank,
and F and B the time of a rank's whole share of the model for one microbatch; the bubble is the idle
part of all rank-time.

ZB-H1 (Qi et al. 2023, arXiv 2401.10241) splits the backward B: the input's gradient (I) comes at
once, because the stage before waits for it, and the weights' (W) later, where the rank would be
idle. A rank that starts its backwards earlier delays its weights' gradients for longer, so that all
ranks hold as many microbatches as 1F1B's first rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

from parallel3d.schedules.schedule import Action, Kind

Actions = list[Action]
# (pp, rank, microbatches, stages per rank) -> forwards before one forward, one backward in turn
WarmUp = Callable[[int, int, int, int], int]

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def naive(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Takes one microbatch at a time through the whole model and back, as a model cut over devices
    does by itself. The bubble is (p - 1) / p for any m; one microbatch is alive. Pipelines are
    measured against this baseline."""
    actions: Actions = []
    stages = range(rank, pp * virtual_stages, pp)
    for m in range(microbatches):
        actions += [Action(stage, F, m) for stage in stages]
        actions += [Action(stage, B, m) for stage in reversed(stages)]
    return actions


def gpipe(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Does all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965, section 2.3). The
    bubble is (p - 1) / (m + p - 1); m microbatches are alive."""
    return [Action(rank, kind, m) for kind in (F, B) for m in range(microbatches)]


def one_f_one_b(pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Does one forward and one backward in turn once the pipeline is full (Narayanan et al. 2021,
    arXiv 2006.09503). The bubble is GPipe's, (p - 1) / (m + p - 1), and only p - rank microbatches
    are alive. With one rank this is gradient accumulation."""
    return pp - rank - 1


def interleaved_1f1b(pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Runs 1F1B over virtual stages: idle time over busy time is (p - 1) / (v m), v times less than
    1F1B's, for v times the transfers (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). At
    most 2 (p - rank - 1) + (v - 1) g + 1 forwards are alive, each of a stage that is 1 / v of the
    rank's share; g is the largest of `groups`, which is p where p divides m."""
    return 2 * (pp - rank - 1) + (virtual_stages - 1) * group_sizes(pp, microbatches)[0]


def looped_bfs(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Takes all microbatches through a stage before the rank's next stage (breadth first), so that
    a stage's parameters are gathered, and its gradients reduced, once a step while other stages
    compute (Lamy-Poirier 2022, arXiv 2211.05953). Idle over busy time is (p - 1) / (v m) for m >=
    p; all v m forwards are alive. Backwards start with the last microbatch, which frees the newest
    activations first."""
    stages = range(rank, pp * virtual_stages, pp)
    forwards = [Action(stage, F, m) for stage in stages for m in range(microbatches)]
    return forwards + [Action(stage, B, m) for stage, _, m in reversed(forwards)]


def zb_h1(pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Orders ZB-H1 (arXiv 2401.10241, section 2.1 and table 1): 1F1B with W delayed by `rank`
    microbatches. Each rank is idle for (p - 1) (F + I - W) / v if W <= F, a third of 1F1B's (p - 1)
    (F + I + W) / v where the three are equal. At most (v - 1) g + p forwards are alive, with g as
    in `interleaved_1f1b`; over virtual stages it is the order of torch.distributed.pipelining's
    ScheduleInterleavedZeroBubble."""
    return (virtual_stages - 1) * group_sizes(pp, microbatches)[0] + pp - rank - 1


def groups(pp: int, microbatches: int) -> list[range]:
    """Returns the groups of microbatches that go round together: as even as possible, the larger
    ones first, and at least pp each where there are as many microbatches. A group smaller than pp
    makes every rank wait at each turn: with pp 4, v 4 and 9 microbatches a rank is idle for 28
    forwards' time in groups of 4, 4 and 1, and for 9 (as with 8 microbatches) in groups of 5 and 4.
    Equal groups give the order of torch.distributed.pipelining."""
    count = max(1, microbatches // pp)
    size, larger = divmod(microbatches, count)
    starts = [size * group + min(group, larger) for group in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def group_sizes(pp: int, microbatches: int) -> tuple[int, int]:
    """Returns the size of the first and of the last of `groups`, by arithmetic: a step may have a
    million of them."""
    count = max(1, microbatches // pp)
    return -(-microbatches // count), microbatches // count


def in_turn(
    pp: int,
    rank: int,
    microbatches: int,
    virtual_stages: int,
    *,
    warm_up: WarmUp,
    splits: bool = False,
) -> Actions:
    """Does as many forwards as `warm_up` says, then forwards and backwards in turn, then the
    backwards that are left; groups of microbatches go round the ranks. With `splits` the backwards
    are split: each I from number `rank` on is followed by the oldest W that is left."""
    stages = range(rank, pp * virtual_stages, pp)
    backward_kind = I if splits else B
    forwards: Actions = []
    backwards: Actions = []
    for group in groups(pp, microbatches):
        for stage in stages:
            forwards += [Action(stage, F, m) for m in group]
        for stage in reversed(stages):
            backwards += [Action(stage, backward_kind, m) for m in group]
    weights = deque(Action(stage, W, m) for stage, kind, m in backwards if kind is I)
    warm = warm_up(pp, rank, microbatches, virtual_stages)
    actions = forwards[:warm]
    for done, backward in enumerate(backwards):
        actions += forwards[warm + done : warm + done + 1]
        actions.append(backward)
        if splits and done >= rank:
            actions.append(weights.popleft())
    return [*actions, *weights]

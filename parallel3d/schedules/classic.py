"""Builders of schedules with looped stages: naive, GPipe, 1F1B, breadth-first and ZB-H1.

Each builder is a pure function of (pipeline ranks, rank, microbatches, stages per rank) that
returns the actions of a rank. The functions of 1F1B, interleaved 1F1B and ZB-H1 return only the
length of their warm-up, for `in_turn`. Stage s is on rank s mod pp.

In the formulas, p is pp, m the number of microbatches, v the stages per rank, and F and B the time
of a rank's share of the model for one microbatch. The bubble is the idle fraction of rank-time.

ZB-H1 (Qi et al. 2023, arXiv 2401.10241) splits the backward pass B. The input gradient (I) comes
first because the previous stage waits for it. The weight gradient (W) comes later, when the rank
would be idle. A rank that starts its backward passes earlier delays its weight gradients longer, so
all ranks hold as many microbatches as the first rank of 1F1B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

from parallel3d.schedules.schedule import Action, Kind

Actions = list[Action]
# Takes (pp, rank, microbatches, stages per rank). Returns the number of forward actions before
# forward and backward actions alternate.
WarmUp = Callable[[int, int, int, int], int]

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def naive(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Runs one microbatch at a time forward and backward through all stages.

    The bubble is (p - 1) / p for any m, and one microbatch is live.
    """
    actions: Actions = []
    stages = range(rank, pp * virtual_stages, pp)
    for m in range(microbatches):
        actions += [Action(stage, F, m) for stage in stages]
        actions += [Action(stage, B, m) for stage in reversed(stages)]
    return actions


def gpipe(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Runs all forward actions, then all backward actions.

    The bubble is (p - 1) / (m + p - 1), and m microbatches are live (Huang et al. 2019, arXiv
    1811.06965, section 2.3).
    """
    return [Action(rank, kind, m) for kind in (F, B) for m in range(microbatches)]


def one_f_one_b(pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Returns the warm-up of 1F1B, which alternates forward and backward actions after it.

    The bubble is that of GPipe, (p - 1) / (m + p - 1), but at most p - rank microbatches are live
    (Narayanan et al. 2021, arXiv 2006.09503). With one rank this is gradient accumulation.
    """
    return pp - rank - 1


def interleaved_1f1b(pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Returns the warm-up of 1F1B over virtual stages.

    For m >= p, the ratio of idle to busy time is (p - 1) / (v m), a factor v smaller than for 1F1B,
    with v times as many transfers (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). At most
    2 (p - rank - 1) + (v - 1) g + 1 forwards are live, each of 1 / v of the rank's share. g is the
    size of the largest of `groups`, which is p if p divides m.
    """
    return 2 * (pp - rank - 1) + (virtual_stages - 1) * group_sizes(pp, microbatches)[0]


def looped_bfs(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Runs all microbatches through a stage before the next stage of the rank (breadth first).

    Parameters of a stage are all-gathered and gradients reduced once per step, overlapped with the
    compute of other stages (Lamy-Poirier 2022, arXiv 2211.05953). The ratio of idle to busy time is
    (p - 1) / (v m) for m >= p. All v m forwards are live. The backward actions start with the last
    microbatch, which frees the newest activations first.
    """
    stages = range(rank, pp * virtual_stages, pp)
    forwards = [Action(stage, F, m) for stage in stages for m in range(microbatches)]
    return forwards + [Action(stage, B, m) for stage, _, m in reversed(forwards)]


def zb_h1(pp: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Returns the warm-up of ZB-H1, which delays each weight gradient (W) of 1F1B.

    On rank r, r other input gradients (I) are computed between the I and the W of a microbatch
    (arXiv 2401.10241, section 2.1 and table 1). Each rank is idle for (p - 1) (F + I - W) / v if
    W <= F. The idle time of 1F1B is (p - 1) (F + I + W) / v, three times as long if F, I and W are
    equal. At most (v - 1) g + p forwards are live, with g as in `interleaved_1f1b`. With virtual
    stages and equal `groups`, the order equals ScheduleInterleavedZeroBubble of
    torch.distributed.pipelining.
    """
    return (virtual_stages - 1) * group_sizes(pp, microbatches)[0] + pp - rank - 1


def groups(pp: int, microbatches: int) -> list[range]:
    """Splits microbatches into the groups that loop over the ranks together.

    Groups are as even as possible, larger ones first, with at least pp microbatches each if there
    are that many. In a smaller group, every rank waits for its next stage at each turn. Equal
    groups give the order of torch.distributed.pipelining.
    """
    count = max(1, microbatches // pp)
    size, larger = divmod(microbatches, count)
    starts = [size * group + min(group, larger) for group in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def group_sizes(pp: int, microbatches: int) -> tuple[int, int]:
    """Returns the sizes of the first and the last of `groups` without building the groups."""
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
    """Alternates forward and backward actions after a warm-up of forward actions.

    Args:
        warm_up: Returns the number of forward actions in the warm-up.
        splits: Split backward passes into I and W. After the first `rank`, each I is followed by
            the oldest pending W.

    Returns:
        Actions of the rank. The remaining W come at the end.
    """
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

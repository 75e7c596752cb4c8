"""Schedules on a V: rank r holds stage r on the way down and stage 2 pp - 1 - r on the way up, so
that a microbatch ends where it began, and the last rank has two stages in a row. Each rank has two
stages; the times F, I, W and B are those of one stage. Fewer microbatches than an order needs are
left out of it: a schedule without all actions of a microbatch is still a schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import count

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
    down = rank
    up = 2 * pp - 1 - rank
    planned = max(2 * pp - 1, microbatches)
    after_down = [(down, I), (down, W)]
    after_up = [(up, F), (up, I), (up, W)]
    work = [(down, F)] * (2 * (pp - rank) - 1)
    work += [(up, F), (down, F)] * rank
    work += after_up * (pp - rank)
    work += [(down, F), *after_down, *after_up] * (planned - 2 * pp + rank + 1)
    work += [*after_down, *after_up] * (pp - rank - 1)
    work += [(down, I), (up, I)] * rank
    work += after_down * (pp - rank)
    work += [(up, W)] * rank + [(down, W)] * rank
    return _with_microbatches(work, microbatches)


def dualpipe_v(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders DualPipe-V (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, halved as in
    github.com/deepseek-ai/DualPipe, whose eight steps these are): forwards of one direction stand
    next to backwards of the other, so that a rank may overlap the communication of one with the
    compute of the other. 2 p + 1 forwards are alive. Each rank is idle for (p - 1) (F&B + B - 3 W),
    with F&B a pair's time; where a pair's two actions follow each other, as they are written here,
    forward first, for (p - 1) (F + I - W) if I <= F. Fewer than 2 p microbatches leave holes.
    """
    down = rank
    up = 2 * pp - 1 - rank
    behind = pp - rank - 1
    planned = max(2 * pp, microbatches)
    work = [(down, F)] * (2 * behind)
    work += [(down, F), (up, F)] * (rank + 1)
    work += [(up, I), (up, W), (up, F)] * behind
    work += [(down, F), (up, B), (up, F), (down, B)] * (planned - 2 * pp + rank + 1)
    work += [(up, B), (up, F), (down, B)] * behind
    tail = [up, down] * (rank + 1)
    work += [(stage, B) for stage in tail[: rank + 1]]
    split = tail[rank + 1 :] + [down] * behind  # their W fill the way out
    work += [(stage, I) for stage in tail[rank + 1 :]]
    for stage in split[:behind]:
        work += [(stage, W), (down, I)]
    work += [(stage, W) for stage in split[behind:]]
    return _with_microbatches(work, microbatches)


def _with_microbatches(work: list[tuple[int, Kind]], microbatches: int) -> Actions:
    """Gives the microbatches to a rank's work, of each stage in their order. An I and a B take the
    next one of the same row, and a W the oldest whose I has no W yet."""
    rows: defaultdict[tuple[int, bool], count[int]] = defaultdict(count)
    split: defaultdict[int, deque[int]] = defaultdict(deque)
    actions = []
    for stage, kind in work:
        microbatch = split[stage].popleft() if kind is W else next(rows[stage, kind is F])
        if kind is I:
            split[stage].append(microbatch)
        if microbatch < microbatches:
            actions.append(Action(stage, kind, microbatch))
    return actions

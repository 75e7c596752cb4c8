"""Builders of V-shaped schedules. Rank r holds stage r and stage 2 pp - 1 - r.

A microbatch ends on the rank where it began, and the last rank holds two consecutive stages. F, I,
W and B are times of one stage. If there are fewer microbatches than a builder needs, the surplus
actions are omitted, which leaves a valid schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import count

from parallel3d.schedules.classic import Actions
from parallel3d.schedules.schedule import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def zb_v(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Runs ZB-V (Qi et al. 2024, arXiv 2405.15362; 2023, arXiv 2401.10241, section 6).

    The order equals ScheduleZBVZeroBubble of torch.distributed.pipelining. If F, I and W are equal,
    no rank is idle between its first and last action. At most 2 p forwards are live, each of half a
    rank's share, the same memory as 1F1B. Rank r starts r steps late, so the bubble is (p - 1) /
    (6 m + p - 1) for m >= 2 p - 1.
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
    """Runs DualPipe-V (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1).

    The order follows the eight steps of DualPipeV in github.com/deepseek-ai/DualPipe. Forward
    actions of one direction are paired with backward actions of the other, so that a rank can
    overlap communication of one with compute of the other. At most 2 p + 1 forwards are live.

    Each rank is idle for (p - 1) (F&B + B - 3 W), with F&B the time of a pair. If the actions of a
    pair run one after the other, as in this order, it is (p - 1) (F + I - W) for I <= F. With
    fewer than 2 p microbatches, ranks are idle for longer.
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
    split = tail[rank + 1 :] + [down] * behind  # The W of these stages fill the ramp-down.
    work += [(stage, I) for stage in tail[rank + 1 :]]
    for stage in split[:behind]:
        work += [(stage, W), (down, I)]
    work += [(stage, W) for stage in split[behind:]]
    return _with_microbatches(work, microbatches)


def _with_microbatches(work: list[tuple[int, Kind]], microbatches: int) -> Actions:
    """Assigns microbatches to a rank's work and omits actions of surplus microbatches.

    Each F takes the next microbatch of its stage, as does each I or B. Each W takes the oldest
    microbatch whose I has no W yet.
    """
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

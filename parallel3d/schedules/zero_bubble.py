"""Schedules whose backward is split: the input's gradient (I) at once, because the stage before waits for it, and the
weights' (W) later, where the rank would be idle. Qi et al. 2023, arXiv 2401.10241. The letters are those of `classic`,
with F, I and W the times of a rank's whole share.

A rank that starts its backwards earlier delays its weights' gradients for longer, so that all ranks hold as many
microbatches as 1F1B's first rank.
"""

from __future__ import annotations

from parallel3d.schedules.classic import Actions, Visits, groups, looped_orders
from parallel3d.schedules.schedule import Action, Kind


def zb_h1(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders ZB-H1 (section 2.1 and table 1 there): 1F1B with W delayed by `rank` microbatches. Each rank is idle for
    (p - 1) (F + I - W) if W <= F, a third of 1F1B's (p - 1) (F + I + W) where the three are equal; at most p
    microbatches are alive."""
    assert virtual_stages == 1
    return interleaved_zb(pp, rank, microbatches, 1)


def interleaved_zb(pp: int, rank: int, microbatches: int, virtual_stages: int) -> Actions:
    """Orders ZB-H1 over virtual stages as torch.distributed.pipelining's ScheduleInterleavedZeroBubble does: each rank
    is idle for (p - 1) (F + I - W) / v. At most (v - 1) g + p forwards are alive, each of 1 / v of a rank's share, with
    g as in `interleaved_1f1b`."""
    warm_up = pp - rank - 1 + (virtual_stages - 1) * groups(pp, microbatches)[0]
    return _split(*looped_orders(pp, rank, microbatches, virtual_stages), warm_up=warm_up, delay=rank)


def _split(forwards: Visits, backwards: Visits, *, warm_up: int, delay: int) -> list[Action]:
    """Does `warm_up` forwards, then forwards and I in turn; each I from number `delay` on is followed by the oldest W
    that is left."""
    actions = [Action(stage, Kind.FORWARD, m) for stage, m in forwards[:warm_up]]
    steady = forwards[warm_up:]
    for done, (stage, m) in enumerate(backwards):
        if done < len(steady):
            actions.append(Action(steady[done][0], Kind.FORWARD, steady[done][1]))
        actions.append(Action(stage, Kind.INPUT, m))
        if done >= delay:
            actions.append(Action(backwards[done - delay][0], Kind.WEIGHT, backwards[done - delay][1]))
    left = backwards[max(0, len(backwards) - delay) :]
    return actions + [Action(stage, Kind.WEIGHT, m) for stage, m in left]

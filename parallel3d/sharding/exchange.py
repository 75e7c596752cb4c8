"""The two collectives of sharded gradients and parameters, over [ranks, width].

[Note: gloo] gloo's own reduce-scatter takes more processor time than its all-reduce, and its all-gather twice that of
broadcasts. So between CPUs rows travel by an all-to-all and are summed here, in the order of the ranks, and parameters
by a broadcast from each rank: the same bytes, in less than half of the time (docs/sharding.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.layers.collectives import all_gather_single, reduce_scatter_single
from parallel3d.mesh import Axis


def start_reduce_scatter(rows: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """[ranks, width] -> how to wait for this rank's row [width] of the sum. `rows` must live until then."""
    if _is_gloo(axis):
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=axis.group, async_op=True)

        def add() -> Tensor:
            wait(work)
            total, *others = received.unbind(0)
            for other in others:
                total += other
            return total

        return add
    own = torch.empty_like(rows[0])
    work = reduce_scatter_single(own, rows.flatten(), group=axis.group, async_op=True)

    def finish() -> Tensor:
        wait(work)
        return own

    return finish


def start_all_gather(own: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """[width] -> how to wait for [ranks, width]."""
    rows = torch.empty(axis.size, len(own), dtype=own.dtype, device=own.device)
    if _is_gloo(axis):
        rows[axis.rank] = own
        works = [
            dist.broadcast(row, group=axis.group, group_src=rank, async_op=True)
            for rank, row in enumerate(rows.unbind(0))
        ]
    else:
        works = [all_gather_single(rows.flatten(), own, group=axis.group, async_op=True)]

    def finish() -> Tensor:
        for work in works:
            wait(work)
        return rows

    return finish


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _is_gloo(axis: Axis) -> bool:
    return dist.get_backend(axis.group) == "gloo"

"""The collectives of the layers, and sizes that tp does not divide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.host_memory.exchange import SLOT_BYTES
from parallel3d.layers.collectives import (
    all_reduce,
    all_reduce_max,
    gather,
    reduce_scatter,
)
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.mesh import Axis

S = 8


def compare_sequence_collectives() -> None:
    """Gather and reduce-scatter along dim 1, for a batch of one and of more, against the same by
    hand."""
    axis, n, rank = (
        Axis.of(init_device_mesh("cpu", (get_world_size(),))),
        get_world_size(),
        get_rank(),
    )
    for batch in (1, 3):
        for features in (2, SLOT_BYTES // 8):  # through shared memory, and by the backend
            whole = torch.arange(float(batch * S)).view(batch, S, 1).expand(batch, S, features)
            part, total = whole.chunk(n, dim=1)[rank], n * (n + 1) / 2
            assert torch.equal(gather(part, axis), whole)
            assert torch.equal(reduce_scatter(whole * (rank + 1), axis), part * total)
            assert torch.equal(all_reduce(part * 1.0, axis), sum(whole.chunk(n, dim=1)))
            assert torch.equal(all_reduce_max(part * 1.0, axis), whole.chunk(n, dim=1)[-1])


def refuse_sizes() -> None:
    tp = init_device_mesh("cpu", (get_world_size(),))
    with pytest.raises(
        ValueError, match=r"ColumnParallelLinear.weight \[7, 4\]: dim 0 of size 7 .* tp = 2"
    ):
        ColumnParallelLinear(4, 7, tp=tp)
    with pytest.raises(ValueError, match="RowParallelLinear"):
        RowParallelLinear(5, 4, tp=tp)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_collectives_join_and_split_dim_1(world: Callable, size: int) -> None:
    world(size).run(compare_sequence_collectives)


def test_sizes_that_tp_does_not_divide_are_refused(world: Callable) -> None:
    world(2).run(refuse_sizes)

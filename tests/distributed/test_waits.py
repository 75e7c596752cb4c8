"""How long collectives wait for a peer that does not come: as long as was said last, in every
group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig
from parallel3d.mesh import build_mesh
from parallel3d.pipeline.links import Links
from parallel3d.schedules.build import build_schedule
from parallel3d.shared_memory.segment import PeerLostError
from parallel3d.torch_private import limit_waits, timeout_of
from tests.distributed.world import World

CPU = torch.device("cpu")


def test_a_limit_holds_in_the_groups_of_all_axes_and_beside_them(
    world: Callable[[int], World],
) -> None:
    for before, after in world(4).run(waits_of_all_groups):
        # torch's default: all ranks, pp, tp, and the group beside the mesh
        assert before == [timedelta(minutes=30)] * 4
        assert after == [timedelta(seconds=7)] * 4


def waits_of_all_groups() -> tuple[list[timedelta], list[timedelta]]:
    mesh = build_mesh(ParallelConfig(pp=2, tp=2), "cpu")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    groups = [dist.group.WORLD, mesh["pp"].get_group(), mesh["tp"].get_group(), mine]
    before = [timeout_of(group, CPU) for group in groups]
    limit_waits(7.0)
    return before, [timeout_of(group, CPU) for group in groups]


def test_a_shorter_limit_holds_for_messages_of_a_pipeline_that_has_been_at_work(
    world: Callable[[int], World],
) -> None:
    assert world(2).run(receives_in_vain) == [
        "lost the connection to pipeline rank 1: ",
        "rank 1 has sent nothing",
    ]


def receives_in_vain() -> str:
    """Rank 0 waits for a message of rank 1 that does not come, after one that came. Both go by the
    backend."""
    mesh = build_mesh(ParallelConfig(pp=2), "cpu")
    schedule = build_schedule("1f1b", pp=2, microbatches=1)
    links = Links(mesh["pp"], schedule, CPU)
    x = torch.zeros(1)
    links.open_groups()
    if links.rank == 1:
        links.isend(x + 1, 0).wait()
        dist.recv(x, src=0)
        return "rank 1 has sent nothing"
    links.complete(links.irecv(x, 1), 1)
    limit_waits(0.5)
    links.begin_run([])
    with pytest.raises(
        PeerLostError, match=r"lost the connection to pipeline rank 1: .*[Tt]ime"
    ) as lost:
        links.complete(links.irecv(x, 1), 1)
    limit_waits(60.0)
    dist.send(x, dst=1)
    return str(lost.value)[:40]

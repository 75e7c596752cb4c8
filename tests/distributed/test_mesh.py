"""The mesh of eight processes: where each stands."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig
from parallel3d.mesh import DATA_ROLES, axes_of, build_mesh, sequence_axis
from parallel3d.sharding.settings import joined_axis
from parallel3d.torch_private import group_of


def coordinates_on_the_mesh(layout: ParallelConfig) -> tuple[dict[str, int], int]:
    mesh = build_mesh(layout, "cpu")
    places = {name: axis.rank for name, axis in axes_of(mesh).items()}
    return places, sequence_axis(mesh, layout.cp).rank


def join_data_axes_after_other_groups() -> int:
    if dist.get_rank() == 0:
        group_of([0], "only on rank 0")
    mesh = build_mesh(ParallelConfig(dp_replicate=2, dp_shard=2), "cpu")
    return joined_axis(mesh, DATA_ROLES, "data").size


def test_a_rank_may_have_made_more_groups_than_its_peers(world: Callable) -> None:
    assert world(4).run(join_data_axes_after_other_groups) == [4] * 4


def test_ranks_stand_where_the_config_says(world: Callable) -> None:
    for layout in (ParallelConfig(pp=2, cp=2, tp=2), ParallelConfig(dp_shard=2, cp=2, tp=2)):
        for rank, (places, cp_rank) in enumerate(world(8).run(coordinates_on_the_mesh, layout)):
            wanted = layout.coordinates(rank)._asdict()
            cp = wanted.pop("cp")
            wanted["dp_shard"] = layout.cp * wanted["dp_shard"] + cp
            assert [*places] == ["pp", "dp_replicate", "dp_shard", "tp"]
            assert places == wanted
            assert cp_rank == cp

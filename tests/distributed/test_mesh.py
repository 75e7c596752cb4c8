"""The mesh of eight processes: where each stands."""

from __future__ import annotations

from collections.abc import Callable

from parallel3d.config.recipe import ParallelConfig
from parallel3d.mesh import axes_of, build_mesh

LAYOUT = ParallelConfig(pp=2, dp_shard=2, tp=2)


def coordinates_on_the_mesh() -> tuple[dict[str, int], list[str]]:
    mesh = build_mesh(LAYOUT, "cpu")
    return {name: axis.rank for name, axis in axes_of(mesh).items()}, list(mesh.mesh_dim_names or ())


def test_ranks_stand_where_the_config_says(world: Callable) -> None:
    for rank, (place, axes) in enumerate(world(8).run(coordinates_on_the_mesh)):
        assert axes == ["pp", "dp_replicate", "dp_shard", "tp"]
        assert place == LAYOUT.coordinates(rank).__dict__

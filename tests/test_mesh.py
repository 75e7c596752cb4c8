"""The mesh: where the ranks of a layout stand."""

from __future__ import annotations

from parallel3d.config.recipe import ParallelConfig
from parallel3d.mesh import Axis

LAYOUT = ParallelConfig(pp=2, dp_shard=2, tp=2)


def test_tp_is_innermost() -> None:
    assert [str(LAYOUT.coordinates(rank)) for rank in (1, 2, 4)] == [
        "pp 0, dp_replicate 0, dp_shard 0, cp 0, tp 1",
        "pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 0",
        "pp 1, dp_replicate 0, dp_shard 0, cp 0, tp 0",
    ]


def test_an_axis_of_one_sends_nothing() -> None:
    assert Axis.of(None) == Axis(1, 0, None)

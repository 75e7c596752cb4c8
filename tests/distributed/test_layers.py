"""Sizes that tp does not divide."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.distributed.layer_cases import tp_mesh


def refuse_sizes() -> None:
    tp = tp_mesh()
    with pytest.raises(
        ValueError, match=r"ColumnParallelLinear.weight \[7, 4\]: dim 0 of size 7 .* tp = 2"
    ):
        ColumnParallelLinear(4, 7, tp=tp)
    with pytest.raises(ValueError, match="RowParallelLinear"):
        RowParallelLinear(5, 4, tp=tp)


def test_sizes_that_tp_does_not_divide_are_refused(world: Callable) -> None:
    world(2).run(refuse_sizes)

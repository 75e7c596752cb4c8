"""The data dimension's names, units and formulas, without processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.config.recipe import ParallelConfig
from parallel3d.config.rules_layout import sharding_errors
from parallel3d.mesh import Axis
from parallel3d.sharding.buckets import Packing
from parallel3d.sharding.settings import own_rows
from parallel3d.sharding.units import units_of


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            {"zero_stage": 1, "sharding": "FULL_SHARD"},
            "means parallel.sharding = SHARD_OPTIMIZER",
        ),
        (
            {"sharding": "FULL_SHARD", "dp_replicate": 2},
            "try HYBRID_SHARD, or parallel.dp_replicate=1",
        ),
        (
            {"sharding": "NO_SHARD", "gather": "microbatch"},
            "NO_SHARD, which keeps full parameters and gradients on each rank",
        ),
        ({"reduce": "microbatch", "pp": 2, "schedule": "zb_h1"}, "which splits the backward pass"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(settings: dict, said: str) -> None:
    (fault,) = sharding_errors(ParallelConfig(**settings))
    assert said in fault
    assert "; try " in fault


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)]
        )
        self.head = nn.Linear(4, 11, bias=False)


def sizes(model: nn.Module, wrap: object = None) -> list[int]:
    return [unit.numel for unit in units_of(model, wrap)]  # type: ignore[arg-type]


def test_units_are_the_blocks_and_what_is_left_comes_first() -> None:
    model = Tree()
    block = 4 * 8 + 8 + 8 * 4 + 4
    assert sizes(model) == [88, block, block, block]
    assert sizes(model, ["blocks.*", "head"]) == [44, block, block, block, 44]


def test_a_tied_parameter_is_in_one_unit() -> None:
    model = Tree()
    model.head.weight = model.embed.weight
    # the head's is also the embedding's
    assert sizes(model, ["blocks.*", "head"]) == [44, 76, 76, 76]
    model.blocks[2][1].weight = model.blocks[0][1].weight
    joined = units_of(model)
    assert [unit.numel for unit in joined] == [44, 2 * 76 - 32, 76]
    assert len(joined[1].modules) == 2


def test_blocks_that_share_a_module_are_one_unit() -> None:
    model = Tree()
    model.blocks[2][1] = model.blocks[0][1]
    joined = units_of(model)
    assert [unit.numel for unit in joined] == [88, 2 * 76 - 36, 76]
    assert joined[1].modules == (model.blocks[0], model.blocks[2])


def test_a_tuple_of_patterns_is_one_unit_wherever_its_modules_are() -> None:
    model = Tree()
    assert sizes(model, [("embed", "head"), "blocks.*"]) == [88, 76, 76, 76]
    assert sizes(model, ["embed", ("blocks.1", "blocks.2"), "head"]) == [76, 44, 2 * 76, 44]
    message = "wrap = norm: matches no module; the model has the children embed, blocks, head"
    with pytest.raises(ValueError, match=message):
        units_of(model, ["blocks.*", ("norm", "head")])


@pytest.mark.parametrize("rows, ranks", [(8, 4), (10, 4), (3, 8), (9, 4), (1, 1)])
def test_packed_rows_are_each_ranks_own_and_come_back(rows: int, ranks: int) -> None:
    tensors = [
        torch.arange(rows * 6.0).view(rows, 2, 3),
        torch.arange(float(rows)),
        torch.arange(2.0 * rows).view(-1, 1),
    ]
    packing = Packing([tensor.shape for tensor in tensors], ranks)
    packed = packing.empty(tensors[0], torch.float32)
    packing.pack(tensors, packed)
    for rank in range(ranks):
        axis = Axis(ranks, rank, None)
        own = [torch.zeros_like(own_rows(tensor, axis)) for tensor in tensors]
        packing.unpack(packed[rank][None], own)
        for part, t in zip(own, tensors, strict=True):
            assert torch.equal(part, own_rows(t, axis))
    for skipped in (None, *range(ranks)):
        back = [torch.zeros_like(tensor) for tensor in tensors]
        packing.unpack(packed, back, skipped=skipped)
        for a, b in zip(back, tensors, strict=True):
            if skipped is not None:
                own_rows(a, Axis(ranks, skipped, None)).add_(
                    own_rows(b, Axis(ranks, skipped, None))
                )
            assert torch.equal(a, b)

"""Cutting a model: every layer on one stage, every parameter under its own name."""

from __future__ import annotations

from itertools import accumulate, combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import (
    OWN_NAMES,
    block_ranges,
    check_nothing_lost,
    cut,
    cut_by_names,
    cut_sequential,
    names_of,
)
from parallel3d.schedules.blocks_per_stage import PartCosts, blocks_per_stage, sizes_between

EVEN = PartCosts(embedding=0.0, block=1.0, head=0.0)
MODEL = ModelConfig(
    layers=5,
    hidden=8,
    heads=2,
    ffn_hidden=12,
    vocab=16,
)


@given(stages=st.integers(1, 12), more=st.integers(0, 30))
def test_every_layer_is_on_one_stage(stages: int, more: int) -> None:
    layers = stages + more
    ranges = block_ranges(blocks_per_stage(layers, stages, EVEN))
    assert [i for blocks in ranges for i in range(blocks.first, blocks.end)] == list(range(layers))
    sizes = [blocks.end - blocks.first for blocks in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_stages_hold_the_whole_model_under_its_own_names() -> None:
    names = {name for name, _ in Llama(MODEL, device="meta").named_parameters()}
    ranges = block_ranges([1, 3, 1])
    check_nothing_lost(names, ranges, OWN_NAMES)
    cut_names = [
        {n for n, _ in cut(Llama(MODEL, device="meta"), blocks).named_parameters()}
        for blocks in ranges
    ]
    assert cut_names == [names_of(blocks, names, OWN_NAMES) for blocks in ranges]
    assert set().union(*cut_names) == names
    assert sum(map(len, cut_names)) == len(names)
    assert "layers.4.mlp.down.weight" in cut_names[2]
    assert "embed.weight" in cut_names[0]


def test_a_parameter_that_no_stage_would_take_is_refused() -> None:
    with pytest.raises(ValueError, match="position.weight"):
        check_nothing_lost({"embed.weight", "position.weight"}, block_ranges([1]), OWN_NAMES)


@given(
    blocks=st.integers(1, 9),
    stages=st.integers(1, 5),
    embedding=st.floats(0.0, 0.02),
    head=st.floats(0.0, 4.0),
)
def test_no_cut_has_a_cheaper_costliest_stage(
    blocks: int, stages: int, embedding: float, head: float
) -> None:
    if stages > blocks:
        return
    costs = PartCosts(embedding=embedding, block=1.0, head=head)

    def worst(sizes: list[int]) -> float:
        return max(
            n + (embedding if s == 0 else 0) + (head if s == stages - 1 else 0)
            for s, n in enumerate(sizes)
        )

    sizes = blocks_per_stage(blocks, stages, costs)
    every_cut = (
        sizes_between(points, blocks) for points in combinations(range(1, blocks + 1), stages - 1)
    )
    assert sum(sizes) == blocks
    for size in sizes[:-1]:
        assert size > 0
    assert worst(sizes) <= min(worst(other) for other in every_cut) + 0.03
    assert sizes_between([*accumulate(sizes[:-1])], blocks) == sizes


RECIPE = """
model: {layers: 6, hidden: 32, heads: 4, ffn_hidden: 48, vocab: 512}
parallel: {pp: 2, virtual_stages: 2, schedule: interleaved_1f1b, stage_boundaries: BOUNDARIES}
train: {steps: 1, global_batch_size: 8, seq_len: 16}
"""


def write_recipe(tmp_path: Path, boundaries: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("BOUNDARIES", boundaries))
    return path


@pytest.mark.parametrize(
    "boundaries, message",
    [
        ("[2, 4]", r"= \[2, 4\]: must be 3 rising numbers .*; try \[\d, \d, \d\]"),
        ("[2, 4, 7]", "must be 3 rising numbers from 0 to model.layers = 6"),
        ("3", "must be a list"),
    ],
)
def test_boundaries_that_cut_nothing_are_refused(
    tmp_path: Path, boundaries: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write_recipe(tmp_path, boundaries), cards=shape_cards())


class TwoRoads(nn.Module):
    """Gives two tensors, and takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(
        self, x: torch.Tensor, skip: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), x if skip is None else skip


def test_a_sequential_is_cut_into_its_own_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 2))
    stages = cut_sequential(model, [2, 3])
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    x = torch.randn(3, 4)
    y = x
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, model(x))
    with pytest.raises(ValueError, match="a stage would have none of the 4 modules"):
        cut_sequential(model, [2, 2])


def test_any_model_is_cut_by_the_names_of_its_modules() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([TwoRoads(), TwoRoads()])
    model.rest = nn.ModuleDict({"last": TwoRoads()})
    stages = cut_by_names(model, ["blocks.0", "blocks.1", "rest.last"], [1])
    assert [name for name, _ in stages[1].named_parameters()][0] == "blocks.1.inner.0.weight"
    x = torch.randn(2, 4)
    y, skip = stages[1](*stages[0](x))
    assert torch.equal(skip, x)
    assert y.shape == x.shape
    with pytest.raises(ValueError, match="no stage holds .*rest.last"):
        cut_by_names(model, ["blocks.0", "blocks.1"], [1])
    with pytest.raises(ValueError, match="tied but on two stages"):
        cut_by_names(model, ["blocks.0", "blocks", "rest"], [1])


def test_a_parameter_that_two_stages_would_train_apart_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"2\.weight and 0\.weight are tied but on two stages"):
        cut_sequential(model, [2])
    model[2].weight = model[1].weight
    assert len(cut_sequential(model, [1])) == 2

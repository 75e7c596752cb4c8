"""A global batch that grows: how large it is in each step, which samples it has, and what a recipe
may ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parallel3d.config.recipe import BatchSizes, ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.config.rules import validate
from parallel3d.data.loader import BatchLoader
from parallel3d.data.windows import ShuffledWindows, TokensInMemory
from parallel3d.errors import ConfigError

RECIPE = Recipe(
    model=ModelConfig(
        layers=2,
        hidden=32,
        heads=4,
        ffn_hidden=64,
        vocab=264,
    ),
    parallel=ParallelConfig(dp_shard=2, microbatch_size=2),
    train=TrainConfig(
        steps=100,
        global_batch_size=32,
        batch_warmup_start=8,
        batch_warmup_increment=12,
        batch_warmup_steps=10,
        seq_len=16,
    ),
)


def test_the_batch_rises_evenly_to_its_full_size() -> None:
    sizes = RECIPE.batch_sizes
    assert [sizes.at(step) for step in range(12)] == [8] * 5 + [20] * 5 + [32] * 2
    short = replace(
        RECIPE.train,
        global_batch_size=8,
        batch_warmup_start=2,
        batch_warmup_steps=6,
    )
    sizes = replace(RECIPE, train=replace(short, batch_warmup_increment=None)).batch_sizes
    assert [sizes.at(step) for step in range(8)] == [2, 2, 4, 4, 6, 6, 8, 8]
    sizes = replace(RECIPE, train=replace(short, batch_warmup_start=None)).batch_sizes
    assert [sizes.at(step) for step in range(3)] == [8, 8, 8]


@pytest.mark.parametrize("dp_size, microbatch_size", [(1, 1), (2, 2)])
def test_no_sample_is_lost_or_seen_twice_in_any_layout(dp_size: int, microbatch_size: int) -> None:
    """Tokens are their own places, so a sequence says where it comes from."""
    ranks = [
        BatchLoader(
            ShuffledWindows(TokensInMemory(np.arange(2000)), seq_len=4, seed=None),
            global_batch_size=12,
            microbatch_size=microbatch_size,
            dp_rank=rank,
            dp_size=dp_size,
            vocab=2000,
            sizes=BatchSizes(full=12, start=4, increment=4, warmup_steps=5),
        )
        for rank in range(dp_size)
    ]
    seen = [
        rank.batch(step).inputs[..., 0].flatten().tolist() for step in range(8) for rank in ranks
    ]
    assert sum(seen, []) == list(range(0, 4 * (3 * 4 + 2 * 8 + 3 * 12), 4))


def refusal(**train: object) -> str:
    with pytest.raises(ConfigError) as error:
        validate(replace(RECIPE, train=replace(RECIPE.train, **train)))  # type: ignore[arg-type]
    return str(error.value)


def test_sizes_that_the_layout_cannot_divide_are_refused_with_ones_that_it_can() -> None:
    validate(RECIPE)
    slice_ = "must be a multiple of 2 data-parallel ranks x parallel.microbatch_size 2 = 4"
    assert refusal(batch_warmup_start=6, batch_warmup_increment=26) == (
        f"train.batch_warmup_start = 6: {slice_}; try 4 or 8\ntrain.batch_warmup_increment = 26: "
        f"{slice_}; try 24 or 28"
    )
    assert "requires train.batch_warmup_steps; try 10" in refusal(batch_warmup_steps=None)
    assert "batch_warmup_steps = 10: only used with train.batch_warmup_start, but it is null" in (
        refusal(batch_warmup_start=None, batch_warmup_increment=None)
    )

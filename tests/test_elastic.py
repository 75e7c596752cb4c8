"""An elastic recipe on other numbers of workers than it says: what fits, what is refused, and with
which advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.config.recipe import (
    LocalSgdConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.config.rules import fit_to_workers, validate
from parallel3d.errors import ConfigError

RECIPE = Recipe(
    model=ModelConfig(
        layers=4,
        hidden=16,
        heads=2,
        ffn_hidden=32,
        vocab=258,
    ),
    train=TrainConfig(steps=40, global_batch_size=24, seq_len=16),
    parallel=ParallelConfig(
        tp=2,
        pp=2,
        dp_shard=2,
        microbatch_size=2,
        elastic=True,
    ),
)


@pytest.mark.parametrize(
    "workers, dp_shard, microbatches", [(4, 1, 12), (8, 2, 6), (12, 3, 4), (48, 12, 1)]
)
def test_the_number_of_workers_sets_dp_shard_and_keeps_the_global_batch(
    workers: int, dp_shard: int, microbatches: int
) -> None:
    fitted = fit_to_workers(RECIPE, workers)
    assert fitted == replace(RECIPE, parallel=replace(RECIPE.parallel, dp_shard=dp_shard))
    assert fitted.parallel.world_size == workers
    assert fitted.microbatches == microbatches


@pytest.mark.parametrize(
    "workers, message",
    [
        (
            6,
            "must be a multiple of 4, the workers per data-parallel shard; try 4, 8, 12,",
        ),
        (2, "WORLD_SIZE = 2: must be a multiple of 4"),
        (
            20,
            "gives dp_shard = 5, but train.global_batch_size = 24: must be a multiple of 5 "
            "data-parallel ranks x parallel.microbatch_size 2 = 10; try 4, 8, 12,",
        ),
    ],
)
def test_another_number_is_refused_with_those_that_would_do(workers: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fit_to_workers(RECIPE, workers)
    assert message in str(refused.value)


def test_a_recipe_that_is_not_elastic_says_how_many_it_needs() -> None:
    fixed = replace(RECIPE, parallel=replace(RECIPE.parallel, elastic=False))
    assert fit_to_workers(fixed, 8) is fixed
    with pytest.raises(
        ConfigError, match="WORLD_SIZE = 4: the layout needs pp 2 x dp_shard 2 x tp 2 = 8 workers"
    ):
        fit_to_workers(fixed, 4)


def test_replicas_that_train_apart_are_not_elastic() -> None:
    parallel = ParallelConfig(dp_replicate=2, elastic=True)
    with pytest.raises(
        ConfigError, match="parallel.elastic = true: .* local_sgd.sync_every = 4, .*=false"
    ):
        validate(replace(RECIPE, parallel=parallel, local_sgd=LocalSgdConfig(sync_every=4)))

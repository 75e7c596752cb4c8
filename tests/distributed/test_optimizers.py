"""Optimizers over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from parallel3d.config import ModelConfig, OptimizerConfig, ParallelConfig, Recipe
from parallel3d.layers.init import initial_weights
from parallel3d.models.llama import Llama
from parallel3d.tools.plain_stack import PlainStack
from tests.distributed.layouts import GROUPED, STEPS, TIED, make_recipe, make_trainer, train, whole_batch

Curve = list[tuple[float, float]]

OPTIMIZERS = {
    "muon": OptimizerConfig(name="muon", lr=3e-3, min_lr_ratio=1.0),
    "adafactor": OptimizerConfig(name="adafactor", lr=2e-2, min_lr_ratio=1.0),
    "sgd": OptimizerConfig(name="sgd", lr=0.1, min_lr_ratio=1.0),
}


def recipe_of(name: str, model: ModelConfig, parallel: ParallelConfig, **train: object) -> Recipe:
    return replace(make_recipe(model, parallel, **train), optimizer=OPTIMIZERS[name])


@cache
def referee_curve(name: str, model: ModelConfig) -> Curve:
    recipe = recipe_of(name, model, ParallelConfig())
    referee = PlainStack(recipe, initial_weights(Llama(model, device="meta"), recipe.train.seed))
    return [referee.train_step(whole_batch(recipe, step)) for step in range(STEPS)]


def curves(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Curve]:
    return {name: train(make_trainer(recipe_of(name, model, parallel)), STEPS) for name in OPTIMIZERS}


LAYOUTS = [
    (1, GROUPED, ParallelConfig(microbatch_size=8)),
    (4, GROUPED, ParallelConfig(tp=2, dp_shard=2, sequence_parallel=True, microbatch_size=2)),
    (4, TIED, ParallelConfig(tp=2, dp_replicate=2, microbatch_size=2)),
    (4, TIED, ParallelConfig(pp=2, dp_replicate=2, microbatch_size=2)),
    (4, GROUPED, ParallelConfig(dp_replicate=2, dp_shard=2)),
]


@pytest.mark.parametrize(("size", "model", "parallel"), LAYOUTS, ids=str)
def test_layouts(world: Callable, size: int, model: ModelConfig, parallel: ParallelConfig) -> None:
    for name, curve in world(size).run(curves, model, parallel)[0].items():
        referee = referee_curve(name, model)
        print(name, [f"{abs(a[0] / b[0] - 1):.1e}" for a, b in zip(curve, referee)], referee[0], referee[-1])

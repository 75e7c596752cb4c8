"""Context parallelism trains the model of one process: losses and gradient norms of eight
clipped steps beside plain torch, and beside one process for what plain torch lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from parallel3d.config.recipe import DataConfig, LocalSgdConfig, ModelConfig, ParallelConfig, Recipe
from parallel3d.data.loader import IGNORED, Batch
from parallel3d.layers.parameter import initial_weights
from parallel3d.models.llama import Llama
from tests.distributed.training_cases import (
    DEEP_TIED,
    DROPPED,
    GPT,
    GROUPED,
    QWEN,
    TIED,
    Curve,
    assert_follows,
    label,
    long,
    make_recipe,
    make_trainer,
    one_case,
    own_batch,
    plain_curve,
    train,
    whole_batch,
)

STEPS = 5
MULTI_QUERY = replace(GROUPED, kv_heads=1)
SP2 = {"tp": 2, "sequence_parallel": True}
INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}

LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (
        TIED,
        {
            "cp": 4,
            "microbatch_size": 4,
            "recompute": "selective",
        },
    ),
    (
        MULTI_QUERY,
        {
            "cp": 2,
            **SP2,
        },
    ),
    (
        GROUPED,
        {
            "cp": 2,
            "dp_shard": 2,
            "sharding": "NO_SHARD",
        },
    ),
    (
        TIED,
        {
            "cp": 2,
            **SP2,
            "pp": 2,
            "schedule": "zb_h1",
            "recompute": "every_n",
            "recompute_every": 2,
        },
    ),
]
LONG: list[tuple[ModelConfig, dict[str, Any]]] = [
    (GROUPED, {"cp": 2, "microbatch_size": 1}),
    (
        DEEP_TIED,
        {
            "cp": 2,
            "pp": 2,
            **INTERLEAVED,
            "recompute": "full",
        },
    ),
    (
        GROUPED,
        {
            "cp": 2,
            "tp": 2,
            "recompute": "full",
        },
    ),
    (
        TIED,
        {
            "cp": 2,
            "dp_replicate": 2,
        },
    ),
]
CASES = [one_case(*each) for each in LAYOUTS]
CASES += [long(one_case(*each)) for each in LONG]


def run(recipe: Recipe) -> Curve:
    return train(make_trainer(recipe), STEPS)


@pytest.mark.parametrize("model, parallel", CASES)
def test_layout_trains_as_plain_torch_does(
    world: Callable, model: ModelConfig, parallel: ParallelConfig
) -> None:
    recipe = make_recipe(model, parallel)
    curves = world(parallel.world_size).run(run, recipe)
    for curve in curves:
        assert curve == curves[0], "the ranks do not agree on what they did"
    assert_follows(curves[0], plain_curve(recipe, STEPS))


def special(
    model: ModelConfig, more: dict[str, Any] | None = None, **sections: Any
) -> ParameterSet:
    parallel = ParallelConfig(**{"cp": 2, "microbatch_size": 2, **(more or {})})
    recipe = replace(make_recipe(model, parallel), **sections)
    name = "-".join([model.architecture, label(parallel, model), *sections])
    return pytest.param(recipe, id=name)


def only_second_half(recipe: Recipe, batch: Batch) -> Batch:
    """Masks the labels in the first half of each sequence."""
    labels = batch.labels.clone()
    labels[..., : recipe.train.seq_len // 2] = IGNORED
    return replace(batch, labels=labels)


def masked_whole_batch(recipe: Recipe, step: int) -> Batch:
    return only_second_half(recipe, whole_batch(recipe, step))


def run_masked(recipe: Recipe) -> tuple[Curve, bool]:
    """Also returns whether this rank starts from its parts of the weights of one process."""
    trainer = make_trainer(recipe)
    weights = initial_weights(Llama(recipe.model, device="meta"), recipe.train.seed)
    is_equal = True
    for parameter in trainer.parameters:
        full = parameter.part.distributed(parameter.local.detach()).full_tensor()
        is_equal = is_equal and torch.equal(full, weights[parameter.name])
    curve = []
    for step in range(STEPS):
        result = trainer.train_step(only_second_half(recipe, own_batch(recipe, step)))
        curve.append((result.loss, result.grad_norm))
    return curve, is_equal


def test_labels_of_only_one_half_count_alike(world: Callable) -> None:
    recipe = make_recipe(GROUPED, ParallelConfig(cp=2, tp=2, microbatch_size=2))
    reference = plain_curve(recipe, STEPS, masked_whole_batch)
    for curve, is_equal in world(4).run(run_masked, recipe):
        assert is_equal
        assert_follows(curve, reference)


MASKED = DataConfig(documents="mask")
SPECIAL = [
    special(QWEN, SP2, data=MASKED),  # a window, and positions by yarn
    long(special(QWEN)),
    long(special(GROUPED, {"recompute": "full"}, data=MASKED)),
    long(special(GPT, SP2, data=MASKED)),
    special(DROPPED),
    long(special(replace(DROPPED, architecture="gpt", kv_heads=None, max_positions=32), SP2)),
    special(GROUPED, {"dp_replicate": 2}, local_sgd=LocalSgdConfig(sync_every=3)),
]


@pytest.mark.parametrize("recipe", SPECIAL)
def test_layout_trains_as_one_process_does(world: Callable, recipe: Recipe) -> None:
    replicas = recipe.parallel.dp_replicate
    alone = replace(recipe, parallel=ParallelConfig(dp_replicate=replicas, microbatch_size=4))
    (curve, *_) = world(recipe.parallel.world_size).run(run, recipe)
    (reference, *_) = world(replicas).run(run, alone)
    assert_follows(curve, reference)

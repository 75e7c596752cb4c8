"""Every layout trains the model that plain torch trains in one process: losses and gradient norms
of 20 clipped steps.

The referee (tools/bench/plain_torch/llama.py) has none of our layers; `assert_follows` says how
close they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from tests.distributed.training_cases import (
    BATCH,
    DEEP,
    DEEP_TIED,
    GROUPED,
    MANY_HEADS,
    TIED,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    one_case,
    own_batch,
    plain_curve,
    train,
)

STEPS = 10


def run_layout(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: int = BATCH,
) -> Curve:
    return train(make_trainer(make_recipe(model, parallel, global_batch_size=batch)), STEPS)


def evaluate_layout(model: ModelConfig, parallel: ParallelConfig) -> tuple[float, float]:
    """Returns the loss of a batch without training on it, and then with."""
    recipe = make_recipe(model, parallel)
    trainer = make_trainer(recipe)
    batch = own_batch(recipe, 0)
    return trainer.evaluate([batch]), trainer.train_step(batch).loss


SIX_LAYERS = replace(TIED, layers=6)
LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (GROUPED, {"microbatch_size": 1}),
    (GROUPED, {"recompute": "full", "microbatch_size": 4}),
    (TIED, {"tp": 2, "sequence_parallel": True, "recompute": "full", "microbatch_size": 4}),
    (GROUPED, {"pp": 2, "schedule": "gpipe"}),
    (SIX_LAYERS, {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 3}),
    (TIED, {"dp_shard": 2, "recompute": "full"}),
    (GROUPED, {"dp_replicate": 2}),
    (SIX_LAYERS, {"pp": 4, "microbatch_size": 1}),  # 1, 2, 2 and 1 layers
    (
        DEEP_TIED,
        {
            "tp": 2,
            "pp": 2,
            "dp_shard": 2,
            "sequence_parallel": True,
            "schedule": "interleaved_1f1b",
            "virtual_stages": 2,
        },
    ),
    (
        TIED,
        {
            "tp": 2,
            "dp_replicate": 2,
            "dp_shard": 2,
            "sequence_parallel": True,
        },
    ),
    (MANY_HEADS, {"tp": 8, "microbatch_size": 8, "sequence_parallel": True}),
]
CASES = [one_case(*each) for each in LAYOUTS]


@pytest.mark.parametrize("model, parallel", CASES)
def test_layout_trains_as_plain_torch_does(
    world: Callable, model: ModelConfig, parallel: ParallelConfig
) -> None:
    curves = world(parallel.world_size).run(run_layout, model, parallel)
    for curve in curves:
        assert curve == curves[0], "the ranks do not agree on what they did"
    assert_follows(curves[0], plain_curve(make_recipe(model, parallel), STEPS))


def test_clipping_is_active_and_the_referee_learns() -> None:
    for model in (GROUPED, TIED, DEEP_TIED, MANY_HEADS):
        curve = plain_curve(make_recipe(model, ParallelConfig()), STEPS)
        assert sum(norm > 0.5 for _, norm in curve) >= STEPS // 2
        assert curve[-1][0] < curve[0][0] - 0.3


PIPELINE = ParallelConfig(pp=2, schedule="interleaved_1f1b", virtual_stages=2)
SEQUENCE = ParallelConfig(tp=2, sequence_parallel=True, microbatch_size=BATCH)


@pytest.mark.parametrize("parallel", [PIPELINE, SEQUENCE], ids=["pp2", "tp2"])
def test_validation_gives_the_loss_of_training_on_the_same_batch(
    world: Callable, parallel: ParallelConfig
) -> None:
    for evaluated, trained in world(2).run(evaluate_layout, DEEP, parallel):
        assert evaluated == pytest.approx(trained, rel=1e-6)


def test_rows_that_the_data_ranks_do_not_divide_are_shared_unevenly(world: Callable) -> None:
    """The weights have 32, 48 and 128 rows, which three ranks share."""
    parallel = ParallelConfig(dp_shard=3)
    reference = plain_curve(make_recipe(TIED, parallel, global_batch_size=6), STEPS)
    assert_follows(world(3).run(run_layout, TIED, parallel, 6)[0], reference)

"""The models and their options in every kind of layout, against one process: the losses and
gradient norms of 8 steps.

That one process computes what it should is shown against transformers (tests/test_models.py) and
plain torch (test_parity)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
from parallel3d.training.state import load_trainer
from tests.distributed.test_layers_llama import ODD, ODD_1005
from tests.distributed.training_cases import (
    DROPPED,
    GPT,
    QWEN,
    Curve,
    assert_follows,
    losses,
    make_recipe,
    make_trainer,
    own_batch,
    save_trainer,
    train,
)

STEPS = 5
DEEP_DROPPED = replace(DROPPED, layers=4)
DROPPED_GPT = replace(GPT, dropout=0.1, attention_dropout=0.1)

LAYOUTS: dict[int, list[tuple[ModelConfig, dict[str, object]]]] = {
    1: [
        (DROPPED, {"recompute": "full"}),
    ],
    2: [
        (DROPPED, {"tp": 2, "microbatch_size": 2}),
        (DROPPED, {"tp": 2, "sequence_parallel": True, "microbatch_size": 4, "recompute": "full"}),
        (
            DEEP_DROPPED,
            {
                "pp": 2,
                "schedule": "interleaved_1f1b",
                "virtual_stages": 2,
                "recompute": "every_n",
            },
        ),
        (GPT, {"tp": 2, "sequence_parallel": True}),
        (ODD_1005, {"tp": 2, "microbatch_size": 8}),
    ],
    4: [
        (DROPPED_GPT, {"tp": 2, "pp": 2, "microbatch_size": 2, "recompute": "full"}),
        (GPT, {"pp": 2, "dp_shard": 2, "schedule": "zb_h1"}),
        (QWEN, {"tp": 2, "pp": 2, "microbatch_size": 2}),
        (
            ODD,
            {
                "tp": 4,
                "microbatch_size": 4,
                "sequence_parallel": True,
                "recompute": "selective",
            },
        ),
    ],
}


def recipe_of(
    model: ModelConfig,
    settings: dict[str, object],
) -> Recipe:
    if settings.get("recompute") == "every_n":
        settings = {"recompute_every": 3, **settings}
    return make_recipe(model, ParallelConfig(**settings))  # type: ignore[arg-type]


def curves(
    cases: list[tuple[ModelConfig, dict[str, object]]],
) -> list[Curve]:
    return [train(make_trainer(recipe_of(model, settings)), STEPS) for model, settings in cases]


@cache
def alone(world: Callable, model: ModelConfig) -> Curve:
    return world(1).run(curves, [(model, {"microbatch_size": 8})])[0][0]


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_trains_the_same_model(world: Callable, size: int) -> None:
    cases = LAYOUTS[size]
    ranks = world(size).run(curves, cases)
    for index, (model, settings) in enumerate(cases):
        curve = ranks[0][index]
        reference = alone(world, model)
        where = f"{model.architecture} {settings}"
        for rank in ranks:
            assert rank[index] == curve, where
        assert_follows(curve, reference)


def test_dropout_is_another_in_each_step_and_none_in_validation(world: Callable) -> None:
    first, again, second, evaluated, plain = world(1).run(losses_of_one_batch)[0]
    assert first == again
    assert abs(first - second) > 1e-4
    assert evaluated == pytest.approx(plain, rel=1e-6)
    assert abs(evaluated - first) > 1e-4


def losses_of_one_batch() -> tuple[float, ...]:
    """Returns losses of the first batch: in the first step, in it again, as if it were the second
    step's, in validation, and without dropout at all."""
    still = make_recipe(DROPPED, ParallelConfig(microbatch_size=8))
    trainer = make_trainer(still)
    batch = own_batch(still, 0)
    start = [p.local.detach().clone() for p in trainer.parameters]
    losses = []
    for step in (0, 0, 1):
        trainer.progress = replace(trainer.progress, step=step)
        losses.append(trainer.train_step(batch).loss)
        with torch.no_grad():
            for parameter, weights in zip(trainer.parameters, start, strict=True):
                parameter.local.copy_(weights)
    plain = make_trainer(
        make_recipe(replace(DROPPED, dropout=0.0, attention_dropout=0.0), still.parallel)
    )
    return (*losses, trainer.evaluate([batch]), plain.evaluate([batch]))


def save_after_ten(path: Path) -> tuple[Curve, int]:
    trainer = make_trainer(make_recipe(ODD, ParallelConfig(tp=4, microbatch_size=8)))
    train(trainer, 10)
    save_trainer(trainer, path)
    return train(trainer, 10), trainer.progress.parameters


def go_on_alone(path: Path) -> Curve:
    trainer = make_trainer(make_recipe(ODD, ParallelConfig(microbatch_size=8)))
    load_trainer(trainer, path)
    assert sum(p.local.numel() for p in trainer.parameters) == trainer.progress.parameters
    return train(trainer, 10)


def test_a_checkpoint_of_shared_heads_and_a_prime_vocabulary_holds_each_weight_once(
    world: Callable, tmp_path: Path
) -> None:
    """A model of two key-value heads and 131 rows is saved at tp 4 and resumed at tp 1."""
    path = tmp_path / "step_00000010"
    uninterrupted, parameters = world(4).run(save_after_ten, path)[0]
    curve = world(1).run(go_on_alone, path)[0]
    assert losses(curve) == pytest.approx(losses(uninterrupted), rel=1e-5)
    stored = [
        math.prod(piece.sizes)
        for tensor in read_manifest(path).tensors.values()
        for piece in tensor.pieces
    ]
    assert sum(stored) == 3 * parameters  # weights and two moments

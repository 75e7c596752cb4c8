"""Frozen parameters stay as they are, and everything else trains as in plain torch in one
process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe
from parallel3d.models.llama import Llama
from parallel3d.training.trainer import Trainer
from tests.distributed.training_cases import (
    DEEP,
    Curve,
    assert_follows,
    losses,
    make_recipe,
    make_trainer,
    plain_stack,
    resume_beside,
    train,
    whole_batch,
)

STEPS = 2


@dataclass(frozen=True)
class FrozenOptions:
    """Patterns of the names of frozen parameters."""

    frozen: list[str] = field(default_factory=list)


def is_frozen(name: str, frozen: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in frozen)


def freeze(model: nn.Module, frozen: list[str]) -> None:
    for name, parameter in model.named_parameters():
        if is_frozen(name, frozen):
            parameter.requires_grad_(False)


class Frozen(Llama):
    """A Llama some of whose parameters are frozen."""

    Options = FrozenOptions

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        super().__init__(config, **settings)
        freeze(self, config.options["frozen"])


MODEL = replace(DEEP, layers=4, architecture=f"{__name__}:Frozen")
SOME = [
    "embed.*",
    "layers.0.*",
    "layers.1.attention.q.*",
    "layers.2.mlp.*",
    "layers.3.attention_norm.*",
    "norm.*",
]
FIRST_STAGE = ["embed.*", "layers.0.*", "layers.1.*"]  # with a tied head
LAST_STAGE = ["layers.2.*", "layers.3.*", "norm.*", "head.*"]

ADAMW = OptimizerConfig(lr=1e-3, min_lr_ratio=1.0)
MUON = replace(ADAMW, name="muon")
BUCKETS = {"bucket_mib": 0.01}
Case = tuple[list[str], dict[str, Any], OptimizerConfig, dict[str, Any]]

BF16 = {"precision": "bf16"}

CASES: dict[int, list[Case]] = {
    1: [
        (LAST_STAGE, {"recompute": "full"}, ADAMW, {"loss_chunk_tokens": 7}),
    ],
    2: [
        (SOME, {"tp": 2, "sequence_parallel": True}, ADAMW, {}),
        (FIRST_STAGE, {"pp": 2}, ADAMW, {}),
        (LAST_STAGE, {"pp": 2, "schedule": "zb_h1"}, MUON, {}),
        (SOME, {"dp_shard": 2, "sharding": "SHARD_OPTIMIZER", **BUCKETS}, ADAMW, BF16),
        (SOME, {"dp_shard": 2, "sharding": "FULL_SHARD"}, ADAMW, {}),
    ],
}


def recipe_of(case: Case) -> Recipe:
    frozen, settings, optimizer, options = case
    parallel = ParallelConfig(**settings)
    recipe = make_recipe(
        replace(MODEL, options={"frozen": frozen}, tied_embeddings=frozen == FIRST_STAGE),
        replace(parallel, microbatch_size=2),
        grad_clip=0.5,
        **options,
    )
    return replace(recipe, optimizer=optimizer)


def plain(case: Case) -> Curve:
    recipe = replace(recipe_of(case), parallel=ParallelConfig())
    stack = plain_stack(recipe)
    freeze(stack.model, case[0])
    return [stack.train_step(whole_batch(recipe, step)) for step in range(STEPS)]


def copies(trainer: Trainer) -> dict[str, torch.Tensor]:
    for parameter in trainer.parameters:
        parameter.part.sync_views()
    return {parameter.name: parameter.local.detach().clone() for parameter in trainer.parameters}


def check(
    trainer: Trainer,
    before: dict[str, torch.Tensor],
) -> None:
    """Asserts that the frozen parameters are what they were before, and in float32 no others."""
    frozen = trainer.recipe.model.options["frozen"]
    precision = trainer.recipe.train.precision
    for name, value in copies(trainer).items():
        has_moved = not torch.equal(value, before[name])
        assert not (has_moved and is_frozen(name, frozen)), name
        assert has_moved or is_frozen(name, frozen) or precision != "fp32" or not value.numel(), (
            name
        )
    for parameter in trainer.parameters:
        assert not (is_frozen(parameter.name, frozen) and parameter.local.grad is not None), (
            parameter.name
        )
    for module in (stage.module for stage in trainer.stages):
        for p in module.parameters():
            if not p.requires_grad:
                assert p.grad is None


def trained(cases: list[Case]) -> list[Curve]:
    curves = []
    for case in cases:
        trainer = make_trainer(recipe_of(case))
        before = copies(trainer)
        curves.append(train(trainer, STEPS))
        check(trainer, before)
    return curves


@pytest.mark.parametrize(
    "size, cases", CASES.items(), ids=lambda value: str(value) if isinstance(value, int) else ""
)
def test_frozen_parameters_neither_move_nor_decay_nor_count_in_the_norm(
    world: Callable, size: int, cases: list[Case]
) -> None:
    ranks = world(size).run(trained, cases)
    for case, *curves in zip(cases, *ranks, strict=True):
        for curve in curves:
            assert curve == curves[0], case
        if "precision" in case[3]:
            assert losses(curves[0]) == pytest.approx(losses(plain(case)), rel=5e-3), case
        else:
            assert_follows(curves[0], plain(case))


def resumed(folder: Path) -> tuple[Curve, Curve]:
    first: Case = (SOME, {"tp": 2}, ADAMW, {})
    then: Case = (SOME, {"dp_shard": 2, "sharding": "SHARD_OPTIMIZER"}, ADAMW, {})
    return resume_beside(recipe_of(first), folder / "step_00000002", 2, into=recipe_of(then))


def test_frozen_parameters_are_saved_and_loaded(world: Callable, tmp_path: Path) -> None:
    for straight, again in world(2).run(resumed, tmp_path):
        assert_follows(again, straight)

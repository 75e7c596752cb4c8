"""Pipelines of the project's own model, through the trainer: split backwards and V shapes with
tensor parallelism, sharded parameters, recompute, tied embeddings and uneven stages, against the
same model in one process.

The schedules' own correctness is test_pipeline.py's; here is what the trainer adds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.layers import linear
from tests.distributed.training_cases import (
    DEEP,
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    one_case,
    own_batch,
    plain_curve,
    resume_beside,
    train,
)

STEPS = 4


def run_layout(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: str,
) -> tuple[Curve, float]:
    """Returns the steps' losses and norms, and the loss of evaluating the first batch of all after
    them."""
    linear.FUSED_FROM_ELEMENTS = 0  # so that even these small weights' gradients are put off
    trainer = make_trainer(make_recipe(model, parallel, precision=precision))
    curve = train(trainer, STEPS)
    return curve, trainer.evaluate([own_batch(trainer.recipe, 0)])


def resume_layout(
    model: ModelConfig, parallel: ParallelConfig, folder: Path
) -> tuple[Curve, Curve]:
    """Returns the last two steps of an uninterrupted run, and of one that was resumed before
    them."""
    return resume_beside(make_recipe(model, parallel), folder / "checkpoint", STEPS - 2)


ZB_V = {"pp": 2, "schedule": "zb_v", "virtual_stages": 2}
LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (GROUPED, {"pp": 2, "schedule": "zb_h1", "recompute": "full"}),
    (GROUPED, {"pp": 2, "stage_boundaries": (0,)}),
    (DEEP_TIED, {**ZB_V, "schedule": "interleaved_1f1b", "stage_boundaries": (1, 3, 4)}),
    (DEEP_TIED, {**ZB_V, "tp": 2, "sequence_parallel": True}),
    (DEEP, {**ZB_V, "schedule": "interleaved_zb", "dp_shard": 2}),
    (DEEP_TIED, {**ZB_V, "schedule": "dualpipe_v", "dp_shard": 2}),
    (TIED, {"pp": 2, "dp_replicate": 2, "schedule": "zb_h1"}),
]
CASES = [one_case(model, settings) for model, settings in LAYOUTS]


@pytest.mark.parametrize("model, parallel", CASES)
def test_layout_trains_as_plain_torch_does(
    world: Callable, model: ModelConfig, parallel: ParallelConfig
) -> None:
    answers = world(parallel.world_size).run(run_layout, model, parallel, "fp32")
    for answer in answers:
        assert answer == answers[0], "the ranks do not agree on what they did"
    curve, _ = answers[0]
    assert_follows(curve, plain_curve(make_recipe(model, parallel), STEPS), last=None)


@pytest.mark.parametrize("microbatch_size", [1, 4], ids=["four microbatches", "one microbatch"])
def test_split_backward_accumulates_in_float32_as_the_full_one_does(
    world: Callable, microbatch_size: int
) -> None:
    """The gradients of bf16 parameters are float32 between microbatches, and on their way where
    there is but one."""
    split, full = (
        world(4).run(
            run_layout,
            GROUPED,
            ParallelConfig(
                pp=2,
                dp_shard=2,
                schedule=schedule,
                microbatch_size=microbatch_size,
            ),
            "bf16",
        )[0]
        for schedule in ("zb_h1", "1f1b")
    )
    assert split[0][0] == pytest.approx(full[0][0], rel=1e-3)
    assert [norm for _, norm in split[0]] == pytest.approx([norm for _, norm in full[0]], rel=1e-2)


def test_a_tied_weight_that_one_rank_has_twice_is_resumed_bitwise(
    world: Callable, tmp_path: Path
) -> None:
    parallel = ParallelConfig(pp=2, schedule="zb_v", virtual_stages=2)
    for through, resumed in world(2).run(resume_layout, DEEP_TIED, parallel, tmp_path):
        assert through == resumed

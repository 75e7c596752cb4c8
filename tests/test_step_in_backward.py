"""What the optimizer's step in the backward saves, to the byte, and what it is refused with."""

from __future__ import annotations

import pytest

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.recipes import find_recipe
from parallel3d.tools.verify.dry_run import dry_run

MODEL = ModelConfig(layers=8, hidden=1024, heads=16, kv_heads=4, ffn_hidden=2816, vocab=8192)


def recipe_of(parallel: ParallelConfig, *, in_backward: bool) -> Recipe:
    train = TrainConfig(steps=1, global_batch_size=parallel.dp, seq_len=64, grad_clip=None)
    optimizer = OptimizerConfig(step_in_backward=in_backward)
    recipe = Recipe(model=MODEL, parallel=parallel, train=train, optimizer=optimizer, run_dir="runs/dry")
    validate(recipe)
    return recipe


def peak(parallel: ParallelConfig, *, in_backward: bool) -> int:
    """Bytes that a rank holds at its most, every tensor counted, in a step on tensors without memory."""
    return dry_run(recipe_of(parallel, in_backward=in_backward), 0, gpu_bytes=2.0**36).peak.total


@pytest.mark.parametrize(
    ("parallel", "share"),
    [
        (ParallelConfig(), 0.75),  # a share of the gradients; the peak moves on to where activations or the ends are
        (ParallelConfig(dp_shard=4, sharding="NO_SHARD"), 0.65),
        (ParallelConfig(dp_shard=4, sharding="FULL_SHARD"), 0.35),
    ],
    ids=["one", "NO_SHARD", "FULL_SHARD"],
)
def test_whole_gradients_never_exist_at_once(parallel: ParallelConfig, share: float) -> None:
    parameters = MODEL.layers * (2 * 1024**2 + 2 * 1024 * 256 + 3 * 1024 * 2816) + 2 * 8192 * 1024  # but the norms'
    gradients = 4 * parameters / (parallel.dp_shard if parallel.strategy == "FULL_SHARD" else 1)
    saved = peak(parallel, in_backward=False) - peak(parallel, in_backward=True)
    assert share * gradients < saved < gradients


def quickstart(*overrides: str) -> Recipe:
    alone = ("parallel.pp=1", "parallel.tp=1", "parallel.dp_shard=1", "parallel.microbatch_size=16")
    usual = ("train.grad_clip=null", "optimizer.step_in_backward=true")
    return load_recipe(find_recipe("quickstart"), [*alone, *usual, *overrides], cards=shape_cards())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["train.grad_clip=1"],
            "train.grad_clip = 1.0 needs the norm of the whole gradient before the first parameter",
        ),
        (["train.precision=fp16"], "skips a step in which any gradient overflows, which is known when all are there"),
        (
            ["train.on_nonfinite=skip"],
            "leaves out a step by its whole gradient, which is known when all parameters have",
        ),
        (["optimizer.name=muon"], "optimizer.name = muon exchanges something of many parameters at once"),
        (["optimizer.name=adafactor"], "would come alone; try optimizer.name=adamw"),
        (
            ["parallel.microbatch_size=4"],
            "the gradients of 4 microbatches are added up, so all of them are there until",
        ),
        (["parallel.pp=2", "model.tied_embeddings=true"], "sums a gradient over the first and the last stage"),
        (["parallel.pp=2", "parallel.schedule=zb_h1"], "puts off the gradients of weights beyond the backward"),
        (
            ["parallel.dp_shard=2", "parallel.dp_replicate=2", "parallel.microbatch_size=4"],
            "parallel.sharding = HYBRID_SHARD is torch's fully_shard, which holds all reduced gradients",
        ),
    ],
)
def test_what_needs_the_whole_gradient_is_refused_with_its_reason(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        quickstart(*overrides)
    (line,) = str(error.value).splitlines()
    assert line.startswith("optimizer.step_in_backward = true: ") and said in line and "; try " in line
    suggestion = line.rpartition("; try ")[2]
    assert quickstart(*overrides, suggestion).optimizer.step_in_backward, "what an error suggests must do"


def test_replicas_that_train_apart_may_step_in_their_backwards() -> None:
    """HYBRID_SHARD sums over the replicas, and these do not."""
    recipe = quickstart(
        "parallel.dp_shard=2", "parallel.dp_replicate=2", "parallel.microbatch_size=4", "local_sgd.sync_every=20"
    )
    assert recipe.of_one_replica.parallel.strategy == "FULL_SHARD"

"""`checkpoint.start_from` in layouts: the weights are those that were saved, to the bit, and all
else begins anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.recipe import LocalSgdConfig, OptimizerConfig, ParallelConfig, Recipe
from parallel3d.errors import CheckpointError
from parallel3d.training.state import load_model
from tests.distributed.test_resharding import global_tensors
from tests.distributed.training_cases import (
    DEEP_TIED,
    Curve,
    assert_follows,
    local_weights,
    make_recipe,
    make_trainer,
    own_batch,
    save_trainer,
    train,
)

STEPS = 3
TOGETHER = LocalSgdConfig()
APART = LocalSgdConfig(sync_every=2, outer_lr=0.7)


def start_recipe(parallel: ParallelConfig, local_sgd: LocalSgdConfig = TOGETHER) -> Recipe:
    """Returns a recipe of the same model with another seed, batch, length of sequences and
    optimizer than `saved`'s."""
    recipe = make_recipe(
        DEEP_TIED,
        parallel,
        seed=5,
        seq_len=16,
        global_batch_size=4,
    )
    return replace(
        recipe,
        optimizer=OptimizerConfig(
            name="sgd",
            lr=0.1,
            min_lr_ratio=1.0,
        ),
        local_sgd=local_sgd,
    )


def save(path: Path, local_sgd: LocalSgdConfig) -> None:
    """Saves a run of three steps. Replicas that train apart are then one step past their last
    meeting."""
    parallel = ParallelConfig(dp_replicate=2, pp=2, microbatch_size=2)
    trainer = make_trainer(replace(make_recipe(DEEP_TIED, parallel), local_sgd=local_sgd))
    train(trainer, STEPS)
    save_trainer(trainer, path)


def started(
    recipe: Recipe,
    path: Path,
    again: Path | None = None,
) -> Curve:
    """Returns the curve of a run that starts with a checkpoint's weights, and saves them before its
    first step."""
    trainer = make_trainer(recipe, initialize=False)
    assert load_model(trainer, path).step == STEPS
    assert trainer.step == 0
    assert trainer.progress.tokens == 0
    if again is not None:
        save_trainer(trainer, again)
    return train(trainer, STEPS)


@pytest.mark.parametrize(
    "saved_by, layouts",
    [
        (
            TOGETHER,
            [
                (ParallelConfig(tp=2, pp=2, sequence_parallel=True), TOGETHER),
                (ParallelConfig(dp_replicate=2, tp=2), APART),
            ],
        ),
        (
            APART,
            [
                (
                    ParallelConfig(
                        dp_shard=2,
                        pp=2,
                        schedule="zb_v",
                        virtual_stages=2,
                    ),
                    TOGETHER,
                )
            ],
        ),
    ],
    ids=["together", "apart"],
)
def test_every_layout_starts_with_the_saved_model(
    world: Callable,
    tmp_path: Path,
    saved_by: LocalSgdConfig,
    layouts: list[tuple[ParallelConfig, LocalSgdConfig]],
) -> None:
    path = tmp_path / "step_00000003"
    world(4).run(save, path, saved_by)
    alone = world(1).run(started, start_recipe(ParallelConfig()), path)[0]
    model = {
        name: tensor for name, tensor in global_tensors(path).items() if name.startswith("model.")
    }
    assert len(model) == 4 * 9 + 2
    for number, (parallel, local) in enumerate(layouts):
        again = tmp_path / f"step_0000010{number}"
        curve = world(4).run(started, start_recipe(parallel, local), path, again)[0]
        saved_again = global_tensors(again)
        for name, tensor in model.items():
            assert tensor.equal(saved_again[name])
        if local == APART:
            for name, tensor in model.items():
                assert tensor.equal(saved_again[f"replica.1.{name}"])
            assert curve[0][0] == pytest.approx(alone[0][0], rel=1e-6)
        else:
            assert_follows(curve, alone, last=None)


def refused(recipe: Recipe, path: Path) -> str:
    """Returns what this rank says of a checkpoint of another model."""
    trainer = make_trainer(recipe)
    before = local_weights(trainer)
    with pytest.raises(CheckpointError) as refusal:
        load_model(trainer, path)
    for old, new in zip(before, local_weights(trainer), strict=True):
        assert old.equal(new)
    # no rank has left the others alone
    trainer.train_step(own_batch(recipe, 0))
    return str(refusal.value)


def test_all_ranks_refuse_another_model_in_the_same_words(world: Callable, tmp_path: Path) -> None:
    path = tmp_path / "step_00000003"
    world(4).run(save, path, TOGETHER)
    recipe = make_recipe(
        replace(
            DEEP_TIED,
            layers=6,
            kv_heads=4,
            tied_embeddings=False,
        ),
        ParallelConfig(tp=2, pp=2),
    )
    said = world(4).run(refused, recipe, path)
    assert len(set(said)) == 1
    lines = said[0].splitlines()
    assert lines[0] == f"{path}: is from another model:"
    for line in (
        "  model.head.weight is missing there and [128, 32] here",
        "  model.layers.*.attention.k.weight (4 tensors) is [16, 32] there and [32, 32] here",
        "  model.layers.*.mlp.up.weight (2 tensors) is missing there and [48, 32] here",
    ):
        assert line in lines
    assert len(lines) == 1 + 1 + 2 + 9

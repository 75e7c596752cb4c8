"""Optimizers over sharded parameters do what torch's own do in one process with plain ones:
PlainStack is the referee.

Muon's iteration is in bf16 on both sides, where the last bit of a gradient may become the first of
an update; its losses differ by 1e-5 even so. Of the same gradient both make the same update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe
from parallel3d.errors import CheckpointError
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.tools.bench.plain_torch.llama import PlainLlama
from parallel3d.tools.check_layout.plain import plain_optimizers
from parallel3d.training.state import load_trainer, tensors_of
from tests.distributed.training_cases import (
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    block_matrices,
    long,
    losses,
    make_recipe,
    make_trainer,
    own_batch,
    plain_curve,
    save_trainer,
    train,
)

STEPS = 4

OPTIMIZERS = {
    # With the usual eps AdamW's first step has the sign of each element's gradient, also of one
    # that is but rounding.
    "muon": OptimizerConfig(name="muon", lr=3e-3, eps=1e-5, min_lr_ratio=1.0),
    "sgd": OptimizerConfig(
        name="sgd",
        lr=0.1,
        nesterov=True,
        min_lr_ratio=1.0,
    ),
}
NARROW = {
    "muon in bf16": replace(
        OPTIMIZERS["muon"],
        state_dtype="bf16",
        lr_adjust="original",
        muon_lr=0.02,
    ),
    "adamw in bf16": OptimizerConfig(
        lr=1e-3,
        state_dtype="bf16",
        min_lr_ratio=1.0,
    ),
}


def recipe_of(
    name: str, model: ModelConfig, parallel: ParallelConfig, **settings: object
) -> Recipe:
    return replace(make_recipe(model, parallel, **settings), optimizer=(OPTIMIZERS | NARROW)[name])


def whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor.clone()


def trained(
    model: ModelConfig, parallel: ParallelConfig, batch: int
) -> dict[str, tuple[Curve, dict[str, float]]]:
    """With each optimizer: the curve, and by how much each parameter of this rank's stages differs,
    after one step more that does not clip, from what torch's own makes of the same whole
    parameters, gradients and no states."""
    results = {}
    for name in OPTIMIZERS:
        recipe = recipe_of(name, model, parallel, global_batch_size=batch)
        unclipped = replace(recipe, train=replace(recipe.train, grad_clip=None))
        results[name] = train(make_trainer(recipe), STEPS), one_step(unclipped)
    return results


def one_step(recipe: Recipe) -> dict[str, float]:
    trainer = make_trainer(recipe)
    plain = PlainLlama(recipe.model)
    parameters = dict(plain.named_parameters())

    def take_gradient(p: LocalParameter) -> None:
        assert p.local.grad is not None
        parameters[p.name].data = whole(p.part.distributed(p.local.detach()))
        parameters[p.name].grad = whole(p.part.distributed(p.local.grad))

    trainer.train_step(own_batch(recipe, 0), observe=take_gradient)
    for optimizer in plain_optimizers(plain, recipe.optimizer, block_matrices(plain)):
        optimizer.step()
    differences = {}
    for p in trainer.parameters:
        after = whole(p.part.distributed(p.local.detach()))
        differences[p.name] = (after - parameters[p.name]).abs().max().item()
    return differences


SHARDED = ParallelConfig(tp=2, dp_shard=2, microbatch_size=4)
LAYOUTS = {
    "tp2-dp_shard2-sp": (GROUPED, replace(SHARDED, sequence_parallel=True)),
    "dp_shard3-uneven": (TIED, ParallelConfig(dp_shard=3, microbatch_size=2)),
    "pp2-dp_shard2-tied": (TIED, ParallelConfig(pp=2, dp_shard=2, microbatch_size=2)),
    "dp_replicate2-dp_shard2": (
        GROUPED,
        ParallelConfig(dp_replicate=2, dp_shard=2, microbatch_size=2),
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        "tp2-dp_shard2-sp",
        "dp_shard3-uneven",
        long("pp2-dp_shard2-tied"),
        long("dp_replicate2-dp_shard2"),
    ],
)
def test_a_layout_trains_as_torch_does_in_one_process(world: Callable, layout: str) -> None:
    model, parallel = LAYOUTS[layout]
    batch = 6 if parallel.dp == 3 else 8
    ranks = world(parallel.world_size).run(trained, model, parallel, batch)
    for name in OPTIMIZERS:
        curves = [rank[name][0] for rank in ranks]
        theirs = plain_curve(recipe_of(name, model, parallel, global_batch_size=batch), STEPS)
        for curve in curves:
            assert curve == curves[0]
        assert_follows(curves[0], theirs, close=1e-4, last=None)
        differences = {key: value for rank in ranks for key, value in rank[name][1].items()}
        assert differences.keys() == {key for key, _ in PlainLlama(model).named_parameters()}
        # weights are up to 1, and updates 1e-3
        assert max(differences.values()) <= 3e-7, f"{name}: {differences}"


def first_half(path: Path) -> dict[str, Curve]:
    """Runs two steps of each optimizer, saves a checkpoint, and runs two more. Returns the curves
    of the last two."""
    results = {}
    for name in OPTIMIZERS | NARROW:
        trainer = make_trainer(recipe_of(name, GROUPED, SHARDED))
        train(trainer, 2)
        save_trainer(trainer, path / name)
        results[name] = train(trainer, 2)
        dtype = torch.bfloat16 if name in NARROW else torch.float32
        for state in trainer.optimizer.state.values():
            assert {tensor.dtype for key, tensor in state.items() if key != "step"} == {dtype}
    return results


def resumed(path: Path, parallel: ParallelConfig) -> dict[str, Curve]:
    results = {}
    for name in OPTIMIZERS | NARROW:
        trainer = make_trainer(recipe_of(name, GROUPED, parallel))
        load_trainer(trainer, path / name)
        results[name] = train(trainer, 2)
    return results


def test_states_are_saved_and_resharded(world: Callable, tmp_path: Path) -> None:
    straight = world(4).run(first_half, tmp_path)[0]
    for size, parallel in ((4, SHARDED), (2, ParallelConfig(pp=2, microbatch_size=4))):
        for name, curve in world(size).run(resumed, tmp_path, parallel)[0].items():
            expected = straight[name]
            if parallel == SHARDED:
                assert curve == expected, f"{name}: not to the bit"
            assert curve[0][0] == pytest.approx(expected[0][0], rel=1e-6), name
            assert losses(curve) == pytest.approx(losses(expected), rel=1e-4), name


def other_optimizer(path: Path) -> tuple[str, list[str]]:
    trainer = make_trainer(recipe_of("sgd", GROUPED, ParallelConfig(microbatch_size=8)))
    save_trainer(trainer, path)
    names = [*tensors_of(trainer)]
    other = make_trainer(make_recipe(GROUPED, ParallelConfig(microbatch_size=8)))
    with pytest.raises(CheckpointError) as error:
        load_trainer(other, path)
    return str(error.value), [name for name in names if name.endswith("embed.weight")]


def test_a_checkpoint_of_another_optimizer_is_refused(world: Callable, tmp_path: Path) -> None:
    message, names = world(1).run(other_optimizer, tmp_path / "step_00000000")[0]
    wanted = "optimizer = sgd in the checkpoint, but adamw in this recipe; resume with that"
    assert wanted in message
    assert names == ["model.embed.weight", "optimizer.momentum_buffer.embed.weight"]

"""What may train inside replicas that train apart: SGD, whose average is synchronous training, 16
bits, and Muon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from parallel3d.config.recipe import (
    LocalSgdConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
)
from tests.distributed.local_sgd_cases import recipe_of
from tests.distributed.training_cases import (
    DEEP,
    DEEP_TIED,
    GROUPED,
    Curve,
    losses,
    make_recipe,
    make_trainer,
    plain_curve,
    train,
)

AVERAGING = LocalSgdConfig(sync_every=1, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
SGD = OptimizerConfig(name="sgd", lr=0.1, nesterov=True, min_lr_ratio=1.0)
SHORT = 12


def recipe_with(
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    local: LocalSgdConfig,
    **train: object,
) -> Recipe:
    recipe = replace(make_recipe(model, parallel, **train), optimizer=optimizer)
    return recipe_of(recipe, **vars(local))


AVERAGED = [
    (DEEP_TIED, ParallelConfig(dp_replicate=2, tp=2, sequence_parallel=True, microbatch_size=2)),
    (DEEP, ParallelConfig(dp_replicate=2, pp=2)),
    (DEEP_TIED, ParallelConfig(dp_replicate=2, dp_shard=2, sharding="SHARD_OPTIMIZER")),
]


def average(cases: list[tuple[ModelConfig, ParallelConfig]]) -> list[Curve]:
    return [
        train(make_trainer(recipe_with(*case, SGD, AVERAGING, grad_clip=None)), SHORT)
        for case in cases
    ]


def synchronous_sgd(model: ModelConfig) -> Curve:
    """Returns the curve of torch.optim.SGD with momentum in one process, on the whole batch."""
    return plain_curve(
        recipe_with(model, ParallelConfig(), SGD, LocalSgdConfig(), grad_clip=None), SHORT
    )


def test_averaging_each_step_of_sgd_is_synchronous_sgd(world: Callable) -> None:
    """SGD is linear in its gradients, momentum and decay included: the mean of what the replicas
    make of theirs is what one makes of the mean. So each step's average has a referee that knows
    nothing of replicas."""
    expected = {model: synchronous_sgd(model) for model in (DEEP, DEEP_TIED)}
    for (model, _), curve in zip(AVERAGED, world(4).run(average, AVERAGED)[0], strict=True):
        theirs = losses(expected[model])
        assert losses(curve) == pytest.approx(theirs, rel=1e-5)
        assert curve[0][0] == pytest.approx(theirs[0], rel=1e-6)
        assert theirs[-1] < theirs[0] - 0.3, "nothing was learned"


def inside(
    precision: str, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> tuple[Curve, int, set[str]]:
    """Ten steps, three of which synchronise; then the skipped ones and the dtypes of what is
    averaged."""
    recipe = recipe_with(
        GROUPED, parallel, optimizer, LocalSgdConfig(sync_every=3), precision=precision
    )
    trainer = make_trainer(replace(recipe, loss_scale=LossScaleConfig(initial=1024.0)))
    assert trainer.outer_loop is not None
    curve = train(trainer, 10)
    return (
        curve,
        trainer.skipped_steps,
        {str(outer.value.dtype) for outer in trainer.outer_loop.parameters},
    )


def inside_all(
    cases: list[tuple[str, ParallelConfig, OptimizerConfig]],
) -> list[tuple[Curve, int, set[str]]]:
    return [inside(*case) for case in cases]


def test_sixteen_bits_inside_replicas_follow_float32(world: Callable) -> None:
    """Their losses are as close as in a synchronous run. The outer parameters are float32 in all
    cases, also beside weights of 16 bits."""
    apart, halves = (
        ParallelConfig(dp_replicate=2, microbatch_size=4),
        {"bf16": 4e-3, "bf16_pure": 4e-3, "fp16": 4e-4},
    )
    plain = make_recipe(GROUPED, apart).optimizer
    cases = [(name, apart, plain) for name in ("fp32", *halves)]
    (exact, _, _), *others = world(2).run(inside_all, cases)[0]
    for (precision, close), (curve, skipped, dtypes) in zip(halves.items(), others, strict=True):
        assert losses(curve) == pytest.approx(losses(exact), rel=close), precision
        assert curve != exact and skipped == 0 and dtypes == {"torch.float32"}

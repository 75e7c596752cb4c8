"""What may train inside replicas that train apart: SGD, whose average is synchronous training, 16 bits, and Muon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from parallel3d.config.recipe import (
    LocalSgdConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
)
from tests.distributed.local_sgd_cases import PlainDiloco, recipe_of
from tests.distributed.training_cases import (
    DEEP,
    DEEP_TIED,
    GROUPED,
    Curve,
    assert_follows,
    has_weights,
    local_weights,
    losses,
    make_loader,
    make_recipe,
    make_trainer,
    overflow_on,
    plain_curve,
    train,
)

AVERAGING = LocalSgdConfig(sync_every=1, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
SGD = OptimizerConfig(name="sgd", lr=0.1, nesterov=True, min_lr_ratio=1.0)
SHORT = 12
MUON = OptimizerConfig(name="muon", lr=3e-3, eps=1e-5, min_lr_ratio=1.0)


def recipe_with(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, local: LocalSgdConfig, **train: object
) -> Recipe:
    recipe = replace(make_recipe(model, parallel, **train), optimizer=optimizer)
    return recipe_of(recipe, **vars(local))


AVERAGED = [
    (DEEP_TIED, ParallelConfig(dp_replicate=2, tp=2, sequence_parallel=True, microbatch_size=2)),
    (DEEP, ParallelConfig(dp_replicate=2, pp=2)),
    (DEEP_TIED, ParallelConfig(dp_replicate=2, dp_shard=2, sharding="SHARD_OPTIMIZER")),
]


def average(cases: list[tuple[ModelConfig, ParallelConfig]]) -> list[Curve]:
    return [train(make_trainer(recipe_with(*case, SGD, AVERAGING, grad_clip=None)), SHORT) for case in cases]


def synchronous_sgd(model: ModelConfig) -> Curve:
    """Returns the curve of torch.optim.SGD with momentum in one process, on the whole batch."""
    return plain_curve(recipe_with(model, ParallelConfig(), SGD, LocalSgdConfig(), grad_clip=None), SHORT)


def test_averaging_each_step_of_sgd_is_synchronous_sgd(world: Callable) -> None:
    """SGD is linear in its gradients, momentum and decay included: the mean of what the replicas make of theirs is what
    one makes of the mean. So each step's average has a referee that knows nothing of replicas."""
    expected = {model: synchronous_sgd(model) for model in (DEEP, DEEP_TIED)}
    for (model, _), curve in zip(AVERAGED, world(4).run(average, AVERAGED)[0], strict=True):
        theirs = losses(expected[model])
        assert losses(curve) == pytest.approx(theirs, rel=1e-5)
        assert curve[0][0] == pytest.approx(theirs[0], rel=1e-6)
        assert theirs[-1] < theirs[0] - 0.3, "nothing was learned"


def inside(precision: str, parallel: ParallelConfig, optimizer: OptimizerConfig) -> tuple[Curve, int, set[str]]:
    """Ten steps, three of which synchronise; then the skipped ones and the dtypes of what is averaged."""
    recipe = recipe_with(GROUPED, parallel, optimizer, LocalSgdConfig(sync_every=3), precision=precision)
    trainer = make_trainer(replace(recipe, loss_scale=LossScaleConfig(initial=1024.0)))
    assert trainer.local_sgd is not None
    curve = train(trainer, 10)
    return curve, trainer.skipped_steps, {str(outer.value.dtype) for outer in trainer.local_sgd.parameters}


def inside_all(cases: list[tuple[str, ParallelConfig, OptimizerConfig]]) -> list[tuple[Curve, int, set[str]]]:
    return [inside(*case) for case in cases]


def test_sixteen_bits_inside_replicas_follow_float32(world: Callable) -> None:
    """Their losses are as close as in a synchronous run. The outer parameters are float32 in all cases, also
    beside weights of 16 bits."""
    apart, halves = ParallelConfig(dp_replicate=2, microbatch_size=4), {"bf16": 4e-3, "bf16_pure": 4e-3, "fp16": 4e-4}
    plain = make_recipe(GROUPED, apart).optimizer
    rounded = replace(plain, stochastic_rounding=True)
    cases = [(name, apart, rounded if name == "bf16_pure" else plain) for name in ("fp32", *halves)]
    (exact, _, _), *others = world(2).run(inside_all, cases)[0]
    for (precision, close), (curve, skipped, dtypes) in zip(halves.items(), others, strict=True):
        assert losses(curve) == pytest.approx(losses(exact), rel=close), precision
        assert curve != exact and skipped == 0 and dtypes == {"torch.float32"}


def skip_together() -> tuple[list[float | None], int, bool]:
    """The scales of five steps, in the third of which the gradient of one replica overflows."""
    parallel = ParallelConfig(dp_replicate=2, tp=2, microbatch_size=4)
    recipe = recipe_with(GROUPED, parallel, OptimizerConfig(), LocalSgdConfig(sync_every=2), precision="fp16")
    trainer = make_trainer(replace(recipe, loss_scale=LossScaleConfig(initial=512.0)))
    overflow_on(trainer, {2}, rank=3)
    loader = make_loader(recipe, dist.get_rank())
    scales, unchanged = [], False
    for step in range(5):
        before = local_weights(trainer)
        scales.append(trainer.train_step(loader.batch(step)).loss_scale)
        unchanged = has_weights(trainer, before) if step == 2 else unchanged
    return scales, trainer.skipped_steps, unchanged


def test_an_overflow_in_one_replica_skips_the_step_of_all(world: Callable) -> None:
    """Each keeps its own parameters of the step before: replicas stay one run, with one loss scale."""
    assert world(4).run(skip_together) == [([512.0, 512.0, 512.0, 256.0, 256.0], 1, True)] * 4


MUONS = [ParallelConfig(dp_replicate=2, tp=2, microbatch_size=4), ParallelConfig(dp_replicate=2, dp_shard=2)]


def muon(layouts: list[ParallelConfig]) -> list[Curve]:
    local = LocalSgdConfig(sync_every=4)
    return [train(make_trainer(recipe_with(GROUPED, parallel, MUON, local)), 14) for parallel in layouts]


def test_muon_inside_replicas_is_torchs_own_in_each(world: Callable) -> None:
    """Its matrices are made orthogonal by the ranks of a replica, of that replica's momentum alone."""
    referee = PlainDiloco(recipe_with(GROUPED, MUONS[0], MUON, LocalSgdConfig(sync_every=4)))
    expected = [referee.train_step() for _ in range(14)]
    for curve in world(4).run(muon, MUONS)[0]:
        assert_follows(curve, expected, close=1e-4, last=None)

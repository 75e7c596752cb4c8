"""Stages that have run alone before the first step train as stages that have not: the same numbers,
bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.config.recipe import (
    ParallelConfig,
    Recipe,
)
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from tests.distributed.test_pipeline import without_shared_memory
from tests.distributed.training_cases import (
    DEEP,
    DEEP_TIED,
    DROPPED,
    GROUPED,
    TIED,
    Curve,
    local_weights,
    make_recipe,
    make_trainer,
    train,
)

STEPS = 2
FOUR = ParallelConfig(pp=2, dp_shard=2, microbatch_size=2)
SPLIT = replace(
    FOUR,
    schedule="interleaved_zb",
    virtual_stages=2,
    sharding="SHARD_GRAD_OP",
)
TP = ParallelConfig(
    pp=2,
    tp=2,
    sequence_parallel=True,
    microbatch_size=2,
)
# one for each way in which a backward pass leaves something behind
RECIPES = [
    make_recipe(DROPPED, FOUR),
    make_recipe(GROUPED, FOUR, precision="fp16"),
    make_recipe(GROUPED, replace(FOUR, sharding="SHARD_OPTIMIZER"), precision="bf16"),
    make_recipe(DEEP, SPLIT),
    make_recipe(TIED, replace(TP, recompute="full"), loss_chunk_tokens=16),
]


def trained(
    recipe: Recipe,
    *,
    warms_up: bool,
) -> tuple[Curve, list[Tensor], int]:
    """Returns the curve, this rank's weights and the number of the first step's forwards of one of
    its stages."""
    trainer = make_trainer(recipe)
    trainer.pipeline.warms_up = warms_up
    forwards: list[int] = []
    module = trainer.stages[0].module
    module.register_forward_pre_hook(lambda module, inputs: forwards.append(len(forwards)))
    curve = train(trainer, 1)
    first_step = len(forwards)
    return [*curve, *train(trainer, STEPS - 1)], local_weights(trainer), first_step


def compare(recipes: list[Recipe]) -> None:
    for recipe in recipes:
        state = torch.get_rng_state()
        cold_curve, cold_weights, cold_forwards = trained(recipe, warms_up=False)
        warm_curve, warm_weights, warm_forwards = trained(recipe, warms_up=True)
        what = f"{recipe.model} {recipe.parallel}"
        assert warm_forwards > cold_forwards == recipe.of_one_replica.microbatches, what
        assert warm_curve == cold_curve, what
        for old, new in zip(cold_weights, warm_weights, strict=True):
            assert torch.equal(old, new), what
        assert torch.equal(torch.get_rng_state(), state), what


class Noisy(nn.Module):
    """A stage with a buffer that each forward changes and a dropout by torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.norm(self.linear(x)))
        return y


def noisy_runs(*, warms_up: bool) -> dict[str, Tensor]:
    """Returns the state and the gradients of a stage after two runs whose gradients add up."""
    torch.manual_seed(get_rank())
    pp = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("pp",))
    schedule = build_schedule("zb_h1", pp=pp.size(), microbatches=4)
    stage = Noisy()
    specs = TensorSpec(("batch", 4))
    runtime = PipelineRuntime(
        [stage], schedule, pp, lambda y, label: y.square().sum(), boundaries=specs
    )
    runtime.warms_up = warms_up
    for batch in (3, 5):
        runtime.run(torch.ones(4, batch, 4), sizes={"batch": batch})
    grads = {f"{name} grad": p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return {**stage.state_dict(), **grads, "generator": torch.get_rng_state()}


def compare_noisy() -> None:
    cold = noisy_runs(warms_up=False)
    warm = noisy_runs(warms_up=True)
    assert len(cold) == len(warm) == 12
    for name in cold:
        assert torch.equal(cold[name], warm[name])


def tied_ends_by_the_backend(parallel: ParallelConfig) -> Curve:
    with without_shared_memory(True):
        return train(make_trainer(make_recipe(DEEP_TIED, parallel)), 2)


def test_warmed_stages_train_bitwise_as_cold_ones(world: Callable) -> None:
    world(4).run(compare, RECIPES)


def test_the_warm_up_leaves_buffers_generators_and_gradients_of_any_module(world: Callable) -> None:
    world(2).run(compare_noisy)


def test_tied_ends_reach_each_other_by_the_backend_too(world: Callable) -> None:
    """The end ranks have a group more than those between them, after which torch would name the
    pipeline's groups."""
    layout = ParallelConfig(pp=4, microbatch_size=2)
    curves = world(4).run(tied_ends_by_the_backend, layout)
    assert curves == world(4).run(tied_ends_by_the_backend, layout)

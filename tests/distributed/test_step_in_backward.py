"""The optimizer's step inside the backward trains as one after it does, and reads and writes the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.config.recipe import LocalSgdConfig, ModelConfig, OptimizerConfig, ParallelConfig, Recipe
from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.data.loader import IGNORED
from parallel3d.errors import DataError, NonFiniteError
from parallel3d.sharding.apply import named_parts, shard
from parallel3d.sharding.settings import ShardingOptions
from tests.distributed.training_cases import (
    DEEP,
    GPT,
    GROUPED,
    QWEN,
    TIED,
    Curve,
    has_weights,
    local_weights,
    losses,
    make_loader,
    make_recipe,
    make_trainer,
    resume_beside,
    train,
)

Case = tuple[ModelConfig, dict[str, object], OptimizerConfig, str]

ADAMW = OptimizerConfig(lr=1e-3, min_lr_ratio=1.0)
SGD = OptimizerConfig(name="sgd", lr=0.1, nesterov=True, warmup_steps=5)
ROUNDED = replace(ADAMW, stochastic_rounding=True)
WHOLE, SPLIT = {"sharding": "NO_SHARD", "bucket_mib": 0.01}, {"sharding": "SHARD_OPTIMIZER", "bucket_mib": 0.02}

CASES: dict[int, list[Case]] = {
    1: [
        (TIED, {"recompute": "full"}, ADAMW, "fp32"),
        (GROUPED, {"recompute": "selective"}, ROUNDED, "bf16_pure"),
    ],
    2: [
        (TIED, {"dp_shard": 2}, ADAMW, "fp32"),
        (TIED, {"dp_shard": 2, **WHOLE}, ADAMW, "fp32"),
        (GROUPED, {"dp_replicate": 2, "recompute": "full", **WHOLE}, ADAMW, "bf16"),
        (QWEN, {"dp_shard": 2, **SPLIT}, ADAMW, "fp32"),
        (GPT, {"tp": 2, "sequence_parallel": True}, SGD, "fp32"),
        (GROUPED, {"pp": 2}, ADAMW, "fp32"),
    ],
    4: [
        (QWEN, {"tp": 2, "dp_shard": 2, "sequence_parallel": True}, ADAMW, "fp32"),
        (replace(GROUPED, kv_heads=1), {"tp": 2, "dp_shard": 2, **SPLIT}, ADAMW, "fp32"),
        (DEEP, {"pp": 2, "dp_shard": 2, "virtual_stages": 2, "schedule": "looped_bfs"}, ADAMW, "fp32"),
    ],
}


def recipe_of(case: Case, *, in_backward: bool) -> Recipe:
    model, settings, optimizer, precision = case
    parallel = ParallelConfig(**settings)  # type: ignore[arg-type]
    parallel = replace(parallel, microbatch_size=8 // parallel.dp)
    recipe = make_recipe(model, parallel, grad_clip=None, precision=precision)
    return replace(recipe, optimizer=replace(optimizer, step_in_backward=in_backward))


def both_ways(cases: list[Case]) -> list[list[Curve]]:
    return [[train(make_trainer(recipe_of(case, in_backward=on)), 6) for on in (False, True)] for case in cases]


@pytest.mark.parametrize("size", CASES)
def test_stepping_in_the_backward_trains_as_stepping_after_it(world: Callable, size: int) -> None:
    ranks = world(size).run(both_ways, CASES[size])
    for rank in ranks:
        for case, (after, within) in zip(CASES[size], rank, strict=True):
            # With bf16 and whole gradients an embedding's is rounded to bf16 on its way, once.
            close = 1e-6 if case[3] == "fp32" else 2e-3
            assert losses(within) == pytest.approx(losses(after), rel=close), case
            assert [norm for _, norm in within] == pytest.approx([norm for _, norm in after], rel=10 * close), case
    assert all(rank == ranks[0] for rank in ranks)


def resumed_the_other_way(path: Path, case: Case, first: bool) -> tuple[Curve, Curve]:
    """Eight steps without a stop, and the last four of them from a checkpoint of the other kind of run."""
    this, other = (recipe_of(case, in_backward=on) for on in (first, not first))
    return resume_beside(this, path, 4, 4, into=other)


def test_a_checkpoint_of_either_way_resumes_in_the_other(world: Callable, tmp_path: Path) -> None:
    for first in (True, False):
        for number, case in enumerate((CASES[2][0], CASES[2][3])):
            path = tmp_path / f"step_0000000{number}_{first}"
            whole, resumed = world(2).run(resumed_the_other_way, path, case, first)[0]
            assert losses(resumed) == pytest.approx(losses(whole), rel=1e-6)


def ignoring(in_backward: bool, settings: dict[str, object], *, apart: bool = False) -> Curve:
    """Five steps on batches whose data ranks have different numbers of labels, and then one without any."""
    recipe = recipe_of((GROUPED, settings, ADAMW, "fp32"), in_backward=in_backward)
    if apart:
        recipe = replace(recipe, local_sgd=LocalSgdConfig(sync_every=2))
    trainer, loader = make_trainer(recipe), make_loader(recipe, dist.get_rank())
    place = recipe.parallel.coordinates(dist.get_rank())
    curve = []
    for step in range(5):
        batch = loader.batch(step)
        batch.labels[..., : 3 + 7 * place.dp_replicate + 9 * place.dp_shard] = IGNORED
        result = trainer.train_step(batch)
        curve.append((result.loss, result.grad_norm))
    before = local_weights(trainer)
    batch = loader.batch(5)
    if not apart or place.dp_replicate == 1:  # where replicas train apart, one without labels stops them all
        batch.labels[...] = IGNORED
    with pytest.raises(DataError, match="step 6: no token of the batch has a label"):
        trainer.train_step(batch)
    assert has_weights(trainer, before) or not in_backward
    return curve


def ignore_both_ways() -> list[list[Curve]]:
    layouts: list[tuple[dict[str, object], bool]] = [({"dp_shard": 2}, False), ({"dp_replicate": 2}, True)]
    return [[ignoring(on, settings, apart=apart) for on in (False, True)] for settings, apart in layouts]


def test_the_number_of_labels_is_known_before_the_first_parameter_is_stepped(world: Callable) -> None:
    """Synchronous data ranks know one number, and each of the replicas that train apart has its own."""
    for rank in world(2).run(ignore_both_ways):
        for after, within in rank:
            assert within == [pytest.approx(step, rel=1e-5) for step in after]


def poisoned() -> tuple[str, int]:
    trainer = make_trainer(recipe_of(CASES[2][0], in_backward=True))
    train(trainer, 1)
    if dist.get_rank() == 1:
        trainer.parameters[-1].local.data.view(-1)[0] = float("nan")
    with pytest.raises(NonFiniteError) as error:
        train(trainer, 1)
    return str(error.value), trainer.step


def test_a_gradient_that_is_not_finite_stops_all_ranks_and_says_that_weights_have_changed(world: Callable) -> None:
    (message, step), other = world(2).run(poisoned)
    assert (message, step) == other and step == 1
    assert "step 2: loss nan, gradient norm nan; the loss is not finite on rank" in message
    assert "itself is not finite" not in message, "the step has made the weights so"
    assert "weights have been stepped with it" in message
    assert "go on from the last checkpoint" in message


def plain_losses(in_backward: bool, strategy: ShardingName) -> tuple[list[float], str]:
    """Returns the losses of four steps of a plain module under `shard`, and the answer to a second backward in one
    step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    options = ShardingOptions(bucket_mib=1e-5, step_in_backward=in_backward)
    data = shard(model, mesh, strategy, wrap=["0", "2"], options=options)
    parts = named_parts(model, data)
    optimizers = {name: torch.optim.SGD([part.local], lr=0.1) for name, part in parts.items()}
    for name, part in parts.items() if in_backward else ():
        part.when_complete(optimizers[name].step)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        data.finish_gradients()
        for name, part in parts.items() if not in_backward else ():
            part.sync_views()
            optimizers[name].step()
        data.publish()
        data.clear_gradients()
    said = ""
    if in_backward and strategy != "FULL_SHARD":
        model(x).square().mean().backward()
        with pytest.raises(RuntimeError) as error:
            model(x).square().mean().backward()
        said = str(error.value)
    return losses, said


def plain_both_ways() -> dict[str, list[tuple[list[float], str]]]:
    strategies: tuple[ShardingName, ...] = ("NO_SHARD", "SHARD_OPTIMIZER", "FULL_SHARD")
    return {strategy: [plain_losses(on, strategy) for on in (False, True)] for strategy in strategies}


def test_any_module_can_be_stepped_in_its_backward(world: Callable) -> None:
    for strategy, (after, within) in world(2).run(plain_both_ways)[0].items():
        assert within[0] == after[0] and after[0][-1] < after[0][0], strategy
        assert within[1].startswith("a second backward in one step") or strategy == "FULL_SHARD"

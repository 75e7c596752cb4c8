"""16 bits in every layout: curves close to float32's, one loss scale for all ranks, and rounding that loses nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d.config.recipe import LossScaleConfig, ParallelConfig, Precision, Recipe
from parallel3d.errors import NonFiniteError
from parallel3d.layers.parameter import initial_weights
from parallel3d.models.llama import Llama
from parallel3d.optimizers.rounding import noise, round_stochastically
from parallel3d.tools.bench.plain_torch.llama import PlainLlama, adamw, token_loss
from parallel3d.training.state import load_trainer, save_trainer
from tests.distributed.training_cases import (
    DEEP,
    GROUPED,
    TIED,
    Curve,
    has_weights,
    local_weights,
    losses,
    make_loader,
    make_recipe,
    make_trainer,
    overflow_on,
    train,
    whole_batch,
)

MODEL = replace(GROUPED, layers=4)  # a stage each of two interleaved ones

LAYOUTS = {
    1: [ParallelConfig(microbatch_size=2)],
    2: [
        ParallelConfig(tp=2, sequence_parallel=True, microbatch_size=4),
        ParallelConfig(pp=2, schedule="interleaved_1f1b", virtual_stages=2, microbatch_size=2),
        ParallelConfig(dp_shard=2, microbatch_size=2),
        ParallelConfig(dp_replicate=2, microbatch_size=4),
        ParallelConfig(dp_shard=2, sharding="NO_SHARD", microbatch_size=2),
        ParallelConfig(dp_shard=2, sharding="SHARD_OPTIMIZER", microbatch_size=2),
    ],
    4: [ParallelConfig(tp=2, pp=2, microbatch_size=2)],
}


def recipe_of(precision: Precision, parallel: ParallelConfig, **scale: float) -> Recipe:
    recipe = make_recipe(MODEL, parallel, precision=precision)
    rounding = replace(recipe.optimizer, stochastic_rounding=precision == "bf16_pure")
    return replace(recipe, optimizer=rounding, loss_scale=LossScaleConfig(**scale))  # type: ignore[arg-type]


def curves(precision: Precision, layouts: list[ParallelConfig]) -> list[Curve]:
    found = []
    for parallel in layouts:
        trainer = make_trainer(recipe_of(precision, parallel, initial=1024.0))
        found.append(train(trainer, 10))
        kept = torch.bfloat16 if precision == "bf16_pure" else torch.float32
        assert {p.local.dtype for p in trainer.parameters} == {kept}
        states = [s for p in trainer.parameters for s in trainer.optimizer.state[p.local].values() if s.ndim]
        assert {s.dtype for s in states} == {kept}
        assert trainer.skipped_steps == 0
    return found


@pytest.fixture(scope="module")
def exact(world: Callable) -> Curve:
    """In float32, in one process."""
    curve: Curve = world(1).run(curves, "fp32", [ParallelConfig(microbatch_size=8)])[0][0]
    return curve


@pytest.mark.parametrize("size", LAYOUTS)
@pytest.mark.parametrize(("precision", "close"), [("bf16", 4e-3), ("bf16_pure", 4e-3), ("fp16", 4e-4)])
def test_16_bits_follow_float32_in_every_layout(
    world: Callable, exact: Curve, precision: Precision, close: float, size: int
) -> None:
    """A rounding of bf16 changes 0.4 % and one of fp16 0.05 %: over ten steps the loss stays as close to float32's."""
    for curve in world(size).run(curves, precision, LAYOUTS[size])[0]:
        assert losses(curve) == pytest.approx(losses(exact), rel=close)
        assert curve != exact


def skip_together(layouts: list[ParallelConfig]) -> None:
    for parallel in layouts:
        trainer = make_trainer(recipe_of("fp16", parallel, initial=1024.0, interval=2))
        overflow_on(trainer, {2}, rank=dist.get_world_size() - 1)
        train(trainer, 2)
        assert (trainer.scaler.scale, trainer.scaler.good_steps) == (2048.0, 0)  # type: ignore[union-attr]
        before = local_weights(trainer)
        result = trainer.train_step(make_loader(trainer.recipe, dist.get_rank()).batch(2))
        assert not result.is_finite and result.loss_scale == 2048.0 and result.grad_norm == float("inf")
        assert has_weights(trainer, before)
        assert trainer.scaler.scale == 1024.0  # type: ignore[union-attr]
        train(trainer, 1)
        assert not any(torch.equal(old, p.local) for old, p in zip(before, trainer.parameters, strict=True))
        assert (trainer.step, trainer.skipped_steps, trainer.tokens) == (4, 1, 4 * 8 * 24)


def test_an_overflow_on_one_rank_alone_skips_the_step_on_all(world: Callable) -> None:
    world(2).run(skip_together, LAYOUTS[2])


def scales_of_trainer(recipe: Recipe, planted: set[int], steps: int) -> tuple[list[float], list[float], int]:
    trainer = make_trainer(recipe)
    overflow_on(trainer, planted, rank=0)
    loader = make_loader(recipe, 0)
    results = [trainer.train_step(loader.batch(step)) for step in range(steps)]
    return [result.loss_scale or 0.0 for result in results], [result.loss for result in results], trainer.skipped_steps


def scales_of_torch(recipe: Recipe, planted: set[int], steps: int) -> tuple[list[float], list[float]]:
    """Runs a plain loop as torch's users write it: float32 weights, a copy in float16, torch.amp.GradScaler."""
    model = PlainLlama(recipe.model)
    model.load(initial_weights(Llama(recipe.model, device="meta"), recipe.train.seed))
    optimizer, scale = adamw(model.parameters(), recipe.optimizer), recipe.loss_scale
    scaler = torch.amp.GradScaler(
        "cpu", scale.initial, scale.growth, backoff_factor=scale.backoff, growth_interval=scale.interval
    )
    scales, losses = [], []
    for step in range(steps):
        batch = whole_batch(recipe, step)
        half = copy.deepcopy(model).half()
        half.requires_grad_(True)
        loss = token_loss(half(batch.inputs.flatten(0, 1)), batch.labels.flatten(0, 1))
        scaler.scale(loss).backward()
        for wide, narrow in zip(model.parameters(), half.parameters(), strict=True):
            wide.grad = None if narrow.grad is None else narrow.grad.float()
        if step in planted:
            next(model.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.grad_clip or float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return scales, losses


def test_the_scale_goes_the_way_of_torchs_own_scaler(world: Callable) -> None:
    """From far too large down to what fits, up again every five good steps until it overflows, and down where an
    overflow is planted."""
    planted, steps = {30, 31, 47}, 60
    recipe = replace(recipe_of("fp16", ParallelConfig(microbatch_size=8), initial=2.0**40, interval=5), model=DEEP)
    scales, losses, skipped = world(1).run(scales_of_trainer, recipe, planted, steps)[0]
    expected, expected_losses = scales_of_torch(recipe, planted, steps)
    assert scales == expected
    assert scales[0] == 2.0**40 and scales[32] == scales[30] / 4 and scales[48] == scales[47] / 2
    assert skipped > 10 + len(planted) and len(set(scales)) > 10
    assert losses == pytest.approx(expected_losses, rel=1e-3)


def fail_at_any_scale(parallel: ParallelConfig) -> str:
    trainer = make_trainer(recipe_of("fp16", parallel, initial=4.0))
    overflow_on(trainer, {1, 2, 3}, rank=1)
    train(trainer, 3)
    with pytest.raises(NonFiniteError) as error:
        train(trainer, 1)
    return str(error.value)


def test_a_loss_that_overflows_at_any_scale_has_diverged(world: Callable) -> None:
    messages = world(2).run(fail_at_any_scale, ParallelConfig(dp_shard=2))
    assert messages[0] == messages[1]
    assert "gradient norm inf even at a loss scale of 1; the first gradient" in messages[0]
    assert "weights are those of step 3" in messages[0]


def resumed_scale(path: Path, parallel: ParallelConfig) -> tuple[Curve, Curve, float, float]:
    """Eight steps without a stop, and the last four of them after a resume; then the scales of both."""
    recipe = recipe_of("fp16", parallel, initial=256.0, interval=3)
    whole, second = make_trainer(recipe), make_trainer(recipe)
    overflow_on(whole, {1, 6}, rank=1)
    overflow_on(second, {6}, rank=1)
    train(whole, 4)
    save_trainer(whole, path)
    load_trainer(second, path)
    assert (second.skipped_steps, second.tokens) == (1, 4 * 8 * 24)
    curve, resumed = train(whole, 4), train(second, 4)
    assert second.skipped_steps == 2
    return curve, resumed, whole.scaler.scale, second.scaler.scale  # type: ignore[union-attr]


def test_a_resumed_run_goes_on_with_its_scale_to_the_bit(world: Callable, tmp_path: Path) -> None:
    """A skipped step before the checkpoint, a rise right after it, for which the steps before it count, and a skip."""
    curve, resumed, scale, resumed_at = world(2).run(resumed_scale, tmp_path / "step_00000004", LAYOUTS[2][0])[0]
    assert resumed == curve
    assert scale == resumed_at == 128.0  # 256, halved, doubled after three good steps, halved


def noise_as_whole(parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """Returns the noise of each parameter as the global tensor."""
    trainer = make_trainer(recipe_of("bf16_pure", parallel))
    whole = {}
    for p in trainer.parameters:
        global_ = p.distributed(noise(p, f"7/{p.name}"))
        whole[p.name] = global_.full_tensor() if isinstance(global_, DTensor) else global_
    return whole


def test_noise_does_not_depend_on_the_layout(world: Callable) -> None:
    (alone,) = world(1).run(noise_as_whole, ParallelConfig())
    for parallel in (
        ParallelConfig(tp=2, dp_shard=2),
        ParallelConfig(tp=2, dp_shard=2, sharding="SHARD_OPTIMIZER"),
        ParallelConfig(pp=2, dp_replicate=2),
    ):
        for seen in world(4).run(noise_as_whole, parallel):
            assert all(torch.equal(part, alone[name]) for name, part in seen.items())
    assert len({tuple(n.flatten()[:8].tolist()) for n in alone.values()}) == len(alone)


def replicas_alike(parallel: ParallelConfig) -> None:
    trainer = make_trainer(recipe_of("bf16_pure", parallel))
    train(trainer, 4)
    for p in trainer.parameters:
        for tensor in (p.local.detach(), trainer.optimizer.state[p.local]["exp_avg_sq"]):
            bits = tensor.contiguous().view(torch.int16).int()
            other = bits.clone()
            dist.broadcast(other, group=trainer.mesh["dp_replicate"].get_group(), group_src=0)
            assert torch.equal(bits, other), f"{p.name} differs between replicas"


def test_replicas_round_alike(world: Callable) -> None:
    world(4).run(replicas_alike, ParallelConfig(tp=2, dp_replicate=2, microbatch_size=4))


def round_with(parallel: ParallelConfig) -> list[tuple[float, float]]:
    """What eight steps of each optimizer take off the first batch's loss, in pure bf16 with stochastic rounding and in
    float32."""
    found = []
    for name, state_dtype in (("adamw", "fp32"), ("sgd", None), ("muon", None), ("adafactor", None)):
        gains = []
        for precision in ("bf16_pure", "fp32"):
            recipe = recipe_of(precision, parallel)
            settings = {"name": name, "state_dtype": state_dtype, "lr": 5e-2 if name == "sgd" else 2e-3}
            trainer = make_trainer(replace(recipe, optimizer=replace(recipe.optimizer, **settings)))
            first = train(trainer, 8)[0][0]
            gains.append(first - trainer.evaluate(make_loader(recipe, dist.get_rank()).batch(0)))
            if precision == "bf16_pure" and name != "adafactor":  # whose statistics are of rows and columns
                states = [s for p in trainer.parameters for s in trainer.optimizer.state[p.local].values() if s.ndim]
                assert {s.dtype for s in states} == {torch.float32 if state_dtype == "fp32" else torch.bfloat16}
            assert trainer.parameters[0].local.dtype == (torch.bfloat16 if precision == "bf16_pure" else torch.float32)
        found.append((gains[0], gains[1]))
    return found


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(tp=2, microbatch_size=8), ParallelConfig(dp_shard=2, microbatch_size=4)],
    ids=["tp2", "dp2"],
)
def test_every_optimizer_rounds_what_it_computes_in_float32(world: Callable, parallel: ParallelConfig) -> None:
    for pure, exact in world(2).run(round_with, parallel)[0]:
        assert pure == pytest.approx(exact, rel=0.1) and exact > 0.01


def small_updates(stochastic: bool) -> tuple[float, float]:
    """How far 20 steps at a rate far below bf16's spacing carry the embedding, and how far they would in float32."""
    moved = []
    for precision in ("bf16_pure", "fp32"):
        recipe = make_recipe(TIED, ParallelConfig(microbatch_size=8), precision=precision)
        rounding = stochastic and precision == "bf16_pure"
        optimizer = replace(recipe.optimizer, lr=2e-6, stochastic_rounding=rounding)
        trainer = make_trainer(replace(recipe, optimizer=optimizer))
        (weight,) = [p.local for p in trainer.parameters if p.name == "embed.weight"]
        before = weight.detach().double().clone()
        train(trainer, 20)
        moved.append(weight.detach().double() - before)
    pure, exact = moved
    return ((pure * exact).sum() / exact.square().sum()).item(), (pure != 0).double().mean().item()


def test_stochastic_rounding_keeps_updates_that_rounding_to_the_nearest_loses(world: Callable) -> None:
    kept, changed = world(1).run(small_updates, True)[0]
    lost, still = world(1).run(small_updates, False)[0]
    assert kept == pytest.approx(1.0, abs=0.1) and 0.1 < changed < 0.9
    assert lost < 0.5 * kept and still < changed


def test_rounding_is_unbiased_and_leaves_what_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(0, 2**16, (40_000,), generator=generator, dtype=torch.int32)
    for value in (1.001, -1.0031, 3e-39, -7.77e20):  # one of them below the smallest normal number
        rounded = round_stochastically(torch.full((40_000,), value), draws).double()
        spacing = rounded.max() - rounded.min()
        assert len(rounded.unique()) == 2
        assert (rounded.mean() - torch.tensor(value).double()).abs() < 5 * spacing * 0.5 / 200
    exact = torch.randn(1000, generator=generator).bfloat16()
    exact[:2] = torch.tensor([float("inf"), 0.0])
    assert torch.equal(round_stochastically(exact.float(), draws[:1000]), exact)


def test_stochastic_rounding_keeps_every_nan_and_makes_no_zero_of_it() -> None:
    nan = torch.full((1000,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nan, torch.full((1000,), 2**16 - 1, dtype=torch.int32)).isnan().all()

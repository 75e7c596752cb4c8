"""Replicas that train apart: the losses of plain DiLoCo in one process, whatever is inside one, and
what resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel3d.config.recipe import LocalSgdConfig, ModelConfig, ParallelConfig, Recipe
from parallel3d.errors import NonFiniteError
from parallel3d.mesh import Axis, Role, build_mesh
from parallel3d.training.local_sgd.transport import CODECS, MeanOverReplicas
from parallel3d.training.state import load_trainer, save_trainer
from parallel3d.training.trainer import Trainer
from tests.distributed.local_sgd_cases import PlainDiloco, recipe_of
from tests.distributed.training_cases import (
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    losses,
    make_loader,
    make_recipe,
    make_trainer,
    train,
    whole_batch,
)

Case = tuple[ModelConfig, ParallelConfig, LocalSgdConfig]
STEPS = 14  # three synchronisations, and two steps more
DILOCO = LocalSgdConfig(sync_every=4)
STREAMING = LocalSgdConfig(sync_every=4, fragments=2, overlap_steps=2)


def local_sgd_recipe(model: ModelConfig, parallel: ParallelConfig, local: LocalSgdConfig) -> Recipe:
    """The run has more steps than a test makes: its last one would synchronise all."""
    return recipe_of(make_recipe(model, parallel, steps=20), **vars(local))


def run(trainer: Trainer, steps: int) -> tuple[Curve, float, float]:
    """The next steps, and the losses of a batch after them: of the outer parameters, and of the
    replicas' own."""
    curve = train(trainer, steps)
    batch = make_loader(trainer.recipe, dist.get_rank()).batch(50)
    return curve, trainer.evaluate(batch), trainer.train_step(batch).loss


def run_cases(cases: list[Case]) -> list[tuple[Curve, float, float]]:
    return [run(make_trainer(local_sgd_recipe(*case)), STEPS) for case in cases]


def run_referee(cases: list[Case]) -> list[tuple[Curve, float]]:
    results = []
    for case in cases:
        recipe = local_sgd_recipe(*case)
        referee = PlainDiloco(recipe)
        curve = [referee.train_step() for _ in range(STEPS)]
        results.append((curve, referee.outer_loss(whole_batch(recipe, 50))))
    return results


LAYOUTS = {
    2: [(TIED, {})],
    4: [
        (GROUPED, {"tp": 2, "sequence_parallel": True, "microbatch_size": 2}),
        (DEEP_TIED, {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
        (GROUPED, {"dp_shard": 2}),
    ],
}


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_of_every_kind_train_as_plain_diloco_does(world: Callable, size: int) -> None:
    cases = [
        (model, ParallelConfig(dp_replicate=2, **settings), local)
        for model, settings in LAYOUTS[size]
        for local in (DILOCO, STREAMING)
    ]
    ranks = world(size).run(run_cases, cases)
    assert all(results == ranks[0] for results in ranks), "the ranks do not agree on what they did"
    (expected,) = world(1).run(run_referee, cases)
    for (curve, outer_loss, own_loss), (referee_curve, referee_outer_loss) in zip(
        ranks[0], expected, strict=True
    ):
        assert_follows(curve, referee_curve)
        assert outer_loss == pytest.approx(referee_outer_loss, rel=1e-5)
        assert abs(outer_loss - own_loss) > 1e-3, (
            "between synchronisations no replica has the outer parameters"
        )


def half_and_on(case: Case, path: Path, half: int) -> Curve:
    trainer = make_trainer(local_sgd_recipe(*case))
    first = train(trainer, half)
    save_trainer(trainer, path)
    return first + train(trainer, STEPS - half)


def resumed(case: Case, path: Path) -> tuple[float, Curve]:
    """The loss of what was loaded (of the outer parameters), and the curve from there."""
    trainer = make_trainer(local_sgd_recipe(*case))
    load_trainer(trainer, path)
    loss = trainer.evaluate(make_loader(trainer.recipe, dist.get_rank()).batch(50))
    return loss, train(trainer, STEPS - trainer.step)


HALF = 6  # in STREAMING a fragment has just left: it is neither averaged nor applied


def test_resuming_between_synchronisations_is_bitwise(world: Callable, tmp_path: Path) -> None:
    """Tied weights on both ends of the pipeline, in eight bits, with a fragment on its way."""
    local = LocalSgdConfig(sync_every=4, fragments=2, overlap_steps=2, transport="int8")
    cases = [
        (DEEP_TIED, ParallelConfig(dp_replicate=2, pp=2, schedule="zb_v", virtual_stages=2), local),
        (TIED, ParallelConfig(dp_replicate=2, dp_shard=2), local),
    ]
    for number, case in enumerate(cases):
        path = tmp_path / f"step_0000000{number}"
        uninterrupted = world(4).run(half_and_on, case, path, HALF)[0]
        assert world(4).run(resumed, case, path)[0][1] == uninterrupted[HALF:]


def test_resuming_with_other_parallelism_inside_a_replica_goes_on_alike(
    world: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "step_00000006"
    pipeline = ParallelConfig(dp_replicate=2, pp=2)
    uninterrupted = world(4).run(half_and_on, (TIED, pipeline, STREAMING), path, HALF)[0]
    for parallel in (
        ParallelConfig(dp_replicate=2, dp_shard=2),
        ParallelConfig(dp_replicate=2, tp=2),
    ):
        _, curve = world(4).run(resumed, (TIED, parallel, STREAMING), path)[0]
        assert curve[0] == pytest.approx(uninterrupted[HALF], rel=1e-6)
        assert losses(curve) == pytest.approx(losses(uninterrupted[HALF:]), rel=1e-5)


def test_any_number_of_replicas_starts_from_the_outer_parameters(
    world: Callable, tmp_path: Path
) -> None:
    """Two replicas, then one of a synchronous run, four, and back: what is loaded is always the
    saved outer model."""
    path = tmp_path / "step_00000006"
    world(2).run(half_and_on, (GROUPED, ParallelConfig(dp_replicate=2), DILOCO), path, HALF)
    saved, _ = world(2).run(resumed, (GROUPED, ParallelConfig(dp_replicate=2), DILOCO), path)[0]
    synchronous = (GROUPED, ParallelConfig(dp_shard=2), LocalSgdConfig())
    for size, case in ((4, (GROUPED, ParallelConfig(dp_replicate=4), DILOCO)), (2, synchronous)):
        loss, curve = world(size).run(resumed, case, path)[0]
        assert loss == pytest.approx(saved, rel=1e-6)
        assert len(curve) == STEPS - HALF and curve[-1][0] < curve[0][0] + 0.1
    again = tmp_path / "step_00000007"
    curve = world(2).run(half_and_on, synchronous, again, HALF)[0]
    _, apart = world(2).run(resumed, (GROUPED, ParallelConfig(dp_replicate=2), DILOCO), again)[0]
    assert apart[0][0] == pytest.approx(curve[HALF][0], rel=1e-6), (
        "the first loss is that of the loaded weights"
    )


def poison_one_replica() -> str:
    trainer = make_trainer(
        local_sgd_recipe(GROUPED, ParallelConfig(dp_replicate=2, tp=2, microbatch_size=4), DILOCO)
    )
    train(trainer, 1)
    if dist.get_rank() == 3:  # the second tp rank of the second replica
        # not of the embedding, most of whose rows are not used
        trainer.parameters[1].local.data[0] = float("nan")
    with pytest.raises(NonFiniteError) as error:
        train(trainer, 1)
    return str(error.value)


def test_one_replica_that_is_not_finite_stops_all_ranks_with_one_error(world: Callable) -> None:
    messages = world(4).run(poison_one_replica)
    assert "step 2: loss nan" in messages[0] and len(set(messages)) == 1


def overflow_on_the_way() -> str:
    local = LocalSgdConfig(sync_every=4, transport="fp16", outer_momentum=0.0, nesterov=False)
    trainer = make_trainer(
        local_sgd_recipe(GROUPED, ParallelConfig(dp_replicate=2, tp=2, microbatch_size=4), local)
    )
    train(trainer, 3)
    assert trainer.outer_loop is not None
    before = [outer.value.clone() for outer in trainer.outer_loop.parameters]
    if dist.get_rank() == 0:
        trainer.outer_loop.parameters[0].value[0, 0] = before[0][0, 0] = 1e6
    with pytest.raises(NonFiniteError) as error:
        train(trainer, 1)
    assert all(
        torch.equal(a, b.value) for a, b in zip(before, trainer.outer_loop.parameters, strict=True)
    )
    return str(error.value)


def test_a_difference_beyond_float16_stops_all_ranks_before_the_outer_step(world: Callable) -> None:
    messages = world(4).run(overflow_on_the_way)
    assert "beyond 65504" in messages[0] and len(set(messages)) == 1


def means_in_every_transport() -> dict[str, tuple[float, bool]]:
    """Returns for each transport the largest error over its bound, and whether the mean of a tensor
    depends on its company."""
    mesh = build_mesh(ParallelConfig(dp_replicate=dist.get_world_size()), "cpu")
    axis, generator = Axis.of(mesh[Role.REPLICATE]), torch.Generator().manual_seed(dist.get_rank())
    tensors = [
        torch.randn(shape, generator=generator) * scale
        for shape, scale in (((3, 100), 1.0), ((7,), 1e-3), ((64, 33), 10.0))
    ]
    bounds = {"fp32": 2.0**-22, "fp16": 2.0**-10, "int8": 1 / 127}
    answers = {}
    for name, codec in CODECS.items():
        means, worst = MeanOverReplicas(tensors, axis, codec).wait(), 0.0
        for tensor, mean in zip(tensors, means, strict=True):
            everyone = [torch.empty_like(tensor) for _ in range(axis.size)]
            dist.all_gather(everyone, tensor)
            stacked = torch.stack(everyone).double()
            error = (mean - stacked.mean(dim=0)).abs().amax() / stacked.abs().amax()
            worst = max(worst, error.item() / bounds[name])
        (alone,) = MeanOverReplicas(tensors[2:], axis, codec).wait()
        answers[name] = worst, not alone.equal(means[2])
    return answers


@pytest.mark.parametrize("size", [2, 4])
def test_means_keep_their_bounds_and_do_not_depend_on_what_travels_along(
    world: Callable, size: int
) -> None:
    for name, (error, depends) in world(size).run(means_in_every_transport)[0].items():
        assert error <= 1.0 and (error > 0.02 or name == "fp32"), name
        assert not depends, name


def parameters_after_an_early_end(steps: int) -> list[list[float]]:
    """Returns this rank's parameters when a run of replicas has ended after `steps`, which its
    recipe does not say."""
    recipe = make_recipe(TIED, ParallelConfig(dp_replicate=2, dp_shard=2), steps=STEPS)
    trainer = make_trainer(replace(recipe, local_sgd=DILOCO))
    train(trainer, steps)
    trainer.end_early()
    return [parameter.local.detach().flatten().tolist() for parameter in trainer.parameters]


def test_replicas_of_a_run_that_a_callback_ends_early_come_together(world: Callable) -> None:
    found = world(4).run(parameters_after_an_early_end, DILOCO.sync_every + 1)
    assert found[:2] == found[2:]

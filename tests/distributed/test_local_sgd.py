"""Replicas that train apart: the losses of plain DiLoCo in one process, whatever is inside one, and
what resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.recipe import (
    LocalSgdConfig,
    LossScaleConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
)
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.training.local_sgd import LocalSgd
from parallel3d.training.state import load_trainer
from parallel3d.training.trainer import Trainer
from tests.distributed.local_sgd_cases import PlainDiloco
from tests.distributed.training_cases import (
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    losses,
    make_recipe,
    make_trainer,
    own_batch,
    save_trainer,
    train,
    whole_batch,
)

Case = tuple[ModelConfig, ParallelConfig, LocalSgdConfig]
HALF = 4
STEPS = 8  # two synchronisations, and two steps more
DILOCO = LocalSgdConfig(sync_every=3)


def local_sgd_recipe(
    model: ModelConfig,
    parallel: ParallelConfig,
    local: LocalSgdConfig,
) -> Recipe:
    """The run has more steps than a test makes: its last one would synchronise all."""
    return replace(make_recipe(model, parallel, steps=20), local_sgd=local)


def run(trainer: Trainer, steps: int) -> tuple[Curve, float, float]:
    """The next steps, and the losses of a batch after them: of the outer parameters, and of the
    replicas' own."""
    curve = train(trainer, steps)
    batch = own_batch(trainer.recipe, 50)
    return curve, trainer.evaluate([batch]), trainer.train_step(batch).loss


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


LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (GROUPED, {"tp": 2, "sequence_parallel": True}),
    (DEEP_TIED, {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
    (GROUPED, {"dp_shard": 2}),
    (DEEP_TIED, {"dp_shard": 2, "sharding": "SHARD_OPTIMIZER"}),
]


def test_replicas_of_every_kind_train_as_plain_diloco_does(world: Callable) -> None:
    cases = [
        (model, ParallelConfig(dp_replicate=2, microbatch_size=2, **settings), DILOCO)
        for model, settings in LAYOUTS
    ]
    ranks = world(4).run(run_cases, cases)
    for results in ranks:
        assert results == ranks[0], "the ranks do not agree on what they did"
    (expected,) = world(1).run(run_referee, cases)
    for (curve, outer_loss, own_loss), (referee_curve, referee_outer_loss) in zip(
        ranks[0], expected, strict=True
    ):
        assert_follows(curve, referee_curve)
        assert outer_loss == pytest.approx(referee_outer_loss, rel=1e-5)
        assert abs(outer_loss - own_loss) > 1e-3, (
            "between synchronisations no replica has the outer parameters"
        )


def half_and_on(case: Case, path: Path) -> Curve:
    trainer = make_trainer(local_sgd_recipe(*case))
    first = train(trainer, HALF)
    save_trainer(trainer, path)
    return first + train(trainer, STEPS - HALF)


def resumed(case: Case, path: Path) -> tuple[float, Curve]:
    """The loss of what was loaded (of the outer parameters), and the curve from there."""
    trainer = make_trainer(local_sgd_recipe(*case))
    load_trainer(trainer, path)
    loss = trainer.evaluate([own_batch(trainer.recipe, 50)])
    return loss, train(trainer, STEPS - trainer.step)


def test_resuming_between_synchronisations_is_bitwise_or_in_another_layout_alike(
    world: Callable, tmp_path: Path
) -> None:
    """Tied weights are on both ends of a pipeline."""
    path = tmp_path / "step_00000004"
    pipeline = ParallelConfig(
        dp_replicate=2,
        pp=2,
        schedule="zb_v",
        virtual_stages=2,
        microbatch_size=2,
    )
    uninterrupted = world(4).run(half_and_on, (DEEP_TIED, pipeline, DILOCO), path)[0]
    assert world(4).run(resumed, (DEEP_TIED, pipeline, DILOCO), path)[0][1] == uninterrupted[HALF:]
    tensor = ParallelConfig(dp_replicate=2, tp=2, microbatch_size=2)
    _, curve = world(4).run(resumed, (DEEP_TIED, tensor, DILOCO), path)[0]
    assert curve[0] == pytest.approx(uninterrupted[HALF], rel=1e-6)
    assert losses(curve) == pytest.approx(losses(uninterrupted[HALF:]), rel=1e-5)


@pytest.mark.long
def test_any_number_of_replicas_starts_from_the_outer_parameters(
    world: Callable, tmp_path: Path
) -> None:
    """Two replicas, then one of a synchronous run, four, and back: what is loaded is always the
    saved outer model."""
    path = tmp_path / "step_00000004"
    two = (GROUPED, ParallelConfig(dp_replicate=2), DILOCO)
    world(2).run(half_and_on, two, path)
    saved, _ = world(2).run(resumed, two, path)[0]
    synchronous = (GROUPED, ParallelConfig(dp_shard=2), LocalSgdConfig())
    for size, case in ((4, (GROUPED, ParallelConfig(dp_replicate=4), DILOCO)), (2, synchronous)):
        loss, curve = world(size).run(resumed, case, path)[0]
        assert loss == pytest.approx(saved, rel=1e-6)
        assert len(curve) == STEPS - HALF
        assert curve[-1][0] < curve[0][0] + 0.1
    again = tmp_path / "step_00000005"
    curve = world(2).run(half_and_on, synchronous, again)[0]
    _, apart = world(2).run(resumed, two, again)[0]
    assert apart[0][0] == pytest.approx(curve[HALF][0], rel=1e-6), (
        "the first loss is that of the loaded weights"
    )


def parameters_after_an_early_end(steps: int) -> list[list[float]]:
    """Returns this rank's parameters when a run of replicas has ended after `steps`, which its
    recipe does not say."""
    recipe = make_recipe(TIED, ParallelConfig(dp_replicate=2, dp_shard=2), steps=STEPS)
    trainer = make_trainer(replace(recipe, local_sgd=DILOCO))
    train(trainer, steps)
    trainer.outer_loop.after_step(steps, is_last=True)
    return [parameter.local.detach().flatten().tolist() for parameter in trainer.parameters]


def test_replicas_of_a_run_that_a_callback_ends_early_come_together(world: Callable) -> None:
    found = world(4).run(parameters_after_an_early_end, DILOCO.sync_every + 1)
    assert found[:2] == found[2:]


def test_a_trainer_that_would_not_synchronise_is_refused() -> None:
    recipe = local_sgd_recipe(TIED, ParallelConfig(dp_replicate=2), DILOCO)
    no: Any = None
    with pytest.raises(ConfigError, match=r"outer_loop_of\(recipe\)"):
        Trainer(recipe, mesh=no, device=no, model_class=no)


def train_in(precision: str) -> tuple[Curve, int, set[str]]:
    """Ten steps, three of which synchronise; then the skipped ones and the dtypes of what is
    averaged."""
    parallel = ParallelConfig(dp_replicate=2, microbatch_size=4)
    recipe = make_recipe(GROUPED, parallel, precision=precision)
    local = LocalSgdConfig(sync_every=3)
    scale = LossScaleConfig(initial=1024.0)
    trainer = make_trainer(replace(recipe, local_sgd=local, loss_scale=scale))
    assert isinstance(trainer.outer_loop, LocalSgd)
    dtypes = {str(value.dtype) for value in trainer.outer_loop.values.values()}
    return train(trainer, 10), trainer.progress.skipped_steps, dtypes


def test_sixteen_bits_inside_replicas_follow_float32(world: Callable) -> None:
    """The outer parameters are float32 in all cases, also beside weights of 16 bits."""
    exact, _, _ = world(2).run(train_in, "fp32")[0]
    for precision, close in {"bf16_pure": 4e-3, "fp16": 4e-4}.items():
        curve, skipped, dtypes = world(2).run(train_in, precision)[0]
        assert losses(curve) == pytest.approx(losses(exact), rel=close), precision
        assert curve != exact
        assert skipped == 0
        assert dtypes == {"torch.float32"}


@pytest.mark.parametrize(
    "changes, parallel, message",
    [
        ({}, {"dp_replicate": 1}, "local_sgd.sync_every = 3: requires at least 2 replicas"),
        ({}, {"sharding": "HYBRID_SHARD"}, "try FULL_SHARD"),
        ({"outer_momentum": 0.0}, {}, "local_sgd.nesterov = true: requires momentum"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(
    changes: dict[str, object], parallel: dict[str, object], message: str
) -> None:
    recipe = local_sgd_recipe(
        GROUPED,
        ParallelConfig(**{"dp_replicate": 2, **parallel}),  # type: ignore[arg-type]
        replace(DILOCO, **changes),  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError) as refusal:
        validate(recipe)
    assert message in str(refusal.value)

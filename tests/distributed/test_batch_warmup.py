"""A batch that grows trains the same model in every layout, and goes on in the middle as if nothing
had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.errors import CheckpointError
from parallel3d.schedules.build import build_schedule
from parallel3d.training.state import load_trainer
from tests.distributed.training_cases import (
    DEEP_TIED,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    plain_curve,
    save_trainer,
    train,
)

STEPS = 8  # sequences: 2, 2, 4, 4, 6, 6, 8, 8
HALF = 3
RAMP = {"batch_warmup_start": 2, "batch_warmup_steps": 6}

LAYOUTS = {
    2: [
        ParallelConfig(
            tp=2,
            sequence_parallel=True,
            microbatch_size=2,
        ),
        ParallelConfig(dp_shard=2),
        ParallelConfig(
            pp=2,
            schedule="interleaved_1f1b",
            virtual_stages=2,
        ),
        ParallelConfig(pp=2, schedule="zb_h1"),
    ],
}


def ramp_recipe(parallel: ParallelConfig, **train: object) -> Recipe:
    return make_recipe(DEEP_TIED, parallel, **{**RAMP, **train})


def train_each(layouts: list[ParallelConfig]) -> list[tuple[Curve, int]]:
    found = []
    for parallel in layouts:
        trainer = make_trainer(ramp_recipe(parallel))
        found.append((train(trainer, STEPS), trainer.progress.tokens))
    return found


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_trains_through_the_rise_as_plain_torch_does(
    world: Callable, size: int
) -> None:
    expected = plain_curve(ramp_recipe(ParallelConfig()), STEPS)
    for curve, tokens in world(size).run(train_each, LAYOUTS[size])[0]:
        assert_follows(curve, expected)
        assert tokens == 24 * (2 + 2 + 4 + 4 + 6 + 6 + 8 + 8)


def stop_and_go_on(parallel: ParallelConfig, path: Path) -> tuple[Curve, Curve, str]:
    """Returns the steps after the third without a stop and after a resume, and the refusal of
    another warm-up."""
    trainer = make_trainer(ramp_recipe(parallel))
    resumed = make_trainer(ramp_recipe(parallel))
    train(trainer, HALF)
    save_trainer(trainer, path)
    load_trainer(resumed, path)
    assert resumed.progress.tokens == trainer.progress.tokens == 24 * (2 + 2 + 4)
    with pytest.raises(
        ValueError, match="schedule 1f1b: must place stages and split backward passes as"
    ):
        trainer.pipeline.run(None, schedule=build_schedule("1f1b", pp=2, microbatches=2))
    other = make_trainer(ramp_recipe(parallel, batch_warmup_steps=3))
    with pytest.raises(CheckpointError) as error:
        load_trainer(other, path)
    return train(trainer, STEPS - HALF), train(resumed, STEPS - HALF), str(error.value)


def test_a_run_goes_on_in_the_middle_of_the_rise_to_the_bit(
    world: Callable, tmp_path: Path
) -> None:
    layout = ParallelConfig(
        pp=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
    )
    straight, resumed, refusal = world(2).run(stop_and_go_on, layout, tmp_path / "step_00000003")[0]
    assert resumed == straight
    seen = "sequences seen = 8 in the checkpoint, but 12 in this recipe; resume with its train"
    assert seen in refusal

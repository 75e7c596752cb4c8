"""A mixture of three sources whose weights change: the same training in every layout, stopped
anywhere and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.recipe import DataConfig, ParallelConfig, Recipe, SourceConfig, WeightsConfig
from parallel3d.errors import CheckpointError
from parallel3d.training.state import load_trainer
from tests.distributed.training_cases import (
    GROUPED,
    STEPS,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    plain_curve,
    save_trainer,
    train,
)

# One source has no weight at first, and another none at last.
MIXED = DataConfig(
    source="text",
    sources=(
        SourceConfig(path="textwrap", weight=0.7),
        SourceConfig(path="inspect", weight=0.3),
        SourceConfig(path="calendar", weight=0.0),
    ),
    stages=(
        WeightsConfig(from_step=6, weights=(0.2, 0.3, 0.5)),
        WeightsConfig(from_step=14, weights=(0.0, 1.0, 3.0)),
    ),
)
MIDDLE = 9  # steps: in the middle of the second stage

LAYOUTS = [ParallelConfig(tp=2, microbatch_size=8), ParallelConfig(dp_shard=2, microbatch_size=4)]


def mixed_recipe(parallel: ParallelConfig, data: DataConfig = MIXED) -> Recipe:
    return replace(make_recipe(GROUPED, parallel), data=data)


def train_each(layouts: list[ParallelConfig]) -> list[Curve]:
    return [train(make_trainer(mixed_recipe(parallel)), STEPS) for parallel in layouts]


def test_every_layout_trains_on_the_mixture_as_plain_torch_does(world: Callable) -> None:
    expected = plain_curve(mixed_recipe(ParallelConfig()))
    for curve in world(2).run(train_each, LAYOUTS)[0]:
        assert_follows(curve, expected)


def stop_and_go_on(path: Path) -> tuple[Curve, Curve, str]:
    """Returns the steps of a run in pp 2, those that go on in dp 2 from the middle of a stage, and
    the refusal to go on with other weights for what has been drawn."""
    trainer = make_trainer(mixed_recipe(ParallelConfig(pp=2, microbatch_size=4)))
    dp2 = ParallelConfig(dp_shard=2, microbatch_size=4)
    first = train(trainer, MIDDLE)
    save_trainer(trainer, path)
    changed = replace(MIXED, stages=(WeightsConfig(from_step=6, weights=(0.5, 0.5, 0.0)),))
    with pytest.raises(CheckpointError) as error:
        load_trainer(make_trainer(mixed_recipe(dp2, changed)), path)
    added = replace(
        MIXED,
        stages=(*MIXED.stages[:1], WeightsConfig(from_step=MIDDLE + 1, weights=(1.0, 1.0, 1.0))),
    )
    load_trainer(make_trainer(mixed_recipe(dp2, added)), path)
    resumed = make_trainer(mixed_recipe(dp2), initialize=False)
    load_trainer(resumed, path)
    return first + train(trainer, STEPS - MIDDLE), train(resumed, STEPS - MIDDLE), str(error.value)


def test_a_run_goes_on_in_the_middle_of_a_stage_at_another_dp(
    world: Callable, tmp_path: Path
) -> None:
    straight, resumed, refusal = world(2).run(stop_and_go_on, tmp_path / "step_00000009")[0]
    expected = plain_curve(mixed_recipe(ParallelConfig()))
    assert_follows(straight, expected)
    assert_follows(straight[:MIDDLE] + resumed, expected)
    assert refusal.partition(": ")[2] == (
        "sequences drawn = {'textwrap': 34, 'inspect': 22, 'calendar': 16} in the checkpoint, but "
        "{'textwrap': 44, 'inspect': 28} in this recipe; resume with its data.sources and "
        "data.stages; to change weights, add an entry to data.stages with from_step: 10"
    )

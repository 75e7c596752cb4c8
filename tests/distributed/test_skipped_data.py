"""Sequences that a run leaves out by data.skip: the same run in every layout, and a resume with
another list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.recipe import DataConfig, ParallelConfig, Recipe, SequenceRange
from parallel3d.errors import CheckpointError
from parallel3d.training.state import load_trainer
from tests.distributed.training_cases import (
    BATCH,
    GROUPED,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    plain_curve,
    save_trainer,
    train,
)

HALF = 3
STEPS = 6
SKIP = (SequenceRange(first=60, last=61), SequenceRange(first=5, last=17))  # in any order


def recipe_without(
    skip: tuple[SequenceRange, ...],
    parallel: ParallelConfig,
) -> Recipe:
    return replace(make_recipe(GROUPED, parallel), data=DataConfig(skip=skip))


def straight_and_resumed(path: Path) -> tuple[Curve, Curve]:
    """Returns six steps in pp 2, and the last three of them resumed in dp 2."""
    trainer = make_trainer(recipe_without(SKIP, ParallelConfig(pp=2, microbatch_size=4)))
    first = train(trainer, HALF)
    save_trainer(trainer, path)
    resumed = make_trainer(recipe_without(SKIP[::-1], ParallelConfig(dp_shard=2)), initialize=False)
    load_trainer(resumed, path)
    return first + train(trainer, HALF), train(resumed, HALF)


def test_every_layout_and_a_resume_leave_out_the_same_sequences(
    world: Callable, tmp_path: Path
) -> None:
    expected = plain_curve(recipe_without(SKIP, ParallelConfig()), STEPS)
    assert expected[:1] != plain_curve(make_recipe(GROUPED, ParallelConfig()), 1)
    straight, resumed = world(2).run(straight_and_resumed, tmp_path / "step_00000003")[0]
    assert_follows(straight, expected)
    assert_follows(straight[:HALF] + resumed, expected)


def resume_with_other_lists(path: Path) -> str:
    """Returns the refusal of a list that differs before the checkpoint's place: 24 sequences, up to
    sample 36."""
    one = ParallelConfig(microbatch_size=BATCH)
    trainer = make_trainer(recipe_without(SKIP, one))
    train(trainer, HALF)
    save_trainer(trainer, path)
    for later in ((), (SequenceRange(first=37, last=1000),)):
        load_trainer(make_trainer(recipe_without((*SKIP[1:], *later), one)), path)
    with pytest.raises(CheckpointError) as error:
        load_trainer(make_trainer(recipe_without((SequenceRange(first=5, last=16),), one)), path)
    return str(error.value)


def test_a_resume_may_change_what_is_still_to_come_and_nothing_else(
    world: Callable, tmp_path: Path
) -> None:
    (refusal,) = world(1).run(resume_with_other_lists, tmp_path / "step_00000003")
    assert refusal.endswith(
        "resume with data.skip=[{first: 60, last: 61}, {first: 5, last: 17}], to which you can add "
        "later ranges"
    )

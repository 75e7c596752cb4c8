"""What a trainer does beside its losses: generation, refusal of what is not finite, validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import get_rank, get_world_size

from parallel3d.config.recipe import CheckpointConfig, LocalSgdConfig, ParallelConfig
from parallel3d.data.tokenizers import ByteTokenizer
from parallel3d.launch.signals import StopRequest
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.callbacks import Callback, Callbacks, RunView
from parallel3d.training.generation import generate
from parallel3d.training.loop import TrainingLoop
from parallel3d.training.step_result import StepResult
from tests.distributed.training_cases import (
    DEEP_TIED,
    GROUPED,
    make_loader,
    make_recipe,
    make_trainer,
    train,
)


def generated(parallel: ParallelConfig) -> list[str]:
    """Returns the likeliest text, and two drawn from the five likeliest tokens at each place."""
    trainer = make_trainer(make_recipe(DEEP_TIED, parallel, sample_tokens=6))
    train(trainer, 4)
    likeliest = trainer.recipe.train
    drawn = replace(likeliest, sample_top_k=5)
    hotter = replace(drawn, sample_temperature=2.0, sample_seed=7)
    return [generate(trainer, ByteTokenizer(), each) for each in (likeliest, drawn, hotter)]


def test_every_layout_writes_the_same_text(world: Callable) -> None:
    (alone,) = world(1).run(generated, ParallelConfig(microbatch_size=8))
    for text in alone:
        assert text.startswith("def ")
        assert len(text) > len("def ")
    for parallel in (
        ParallelConfig(
            tp=2,
            pp=2,
            sequence_parallel=True,
            microbatch_size=8,
        ),
        ParallelConfig(cp=2, tp=2, microbatch_size=2),
        ParallelConfig(
            pp=2, dp_shard=2, microbatch_size=2, schedule="interleaved_1f1b", virtual_stages=2
        ),
    ):
        assert world(4).run(generated, parallel) == [alone] * 4


class EnoughAtThree(Callback):
    """Asks to stop after the third step."""

    def step_done(self, run: RunView, result: StepResult) -> None:
        if run.step == 3:
            run.stop("enough")


def stopped_by_a_callback(
    parallel: ParallelConfig, folder: Path
) -> tuple[int, list[str], list[str]]:
    """Returns the step at which a run ends, the checkpoints it leaves and what is said, as this
    rank has them."""
    trainer = make_trainer(make_recipe(GROUPED, parallel))
    trainer.recipe = replace(trainer.recipe, checkpoint=CheckpointConfig(every=15))
    rank = get_rank()
    said = ProgressDisplay()
    said.say = (lines := []).append  # type: ignore[method-assign]
    watchers = [EnoughAtThree()] if rank == 0 else []
    callbacks = Callbacks(watchers, RunView(trainer.recipe, folder, said.say))
    loaders = (make_loader(trainer.recipe, rank), ())
    TrainingLoop(trainer, loaders, folder, None, said, StopRequest(), callbacks).fit()
    return trainer.step, [path.name for path in folder.iterdir()], lines


def test_all_ranks_end_after_the_same_step_where_a_callback_asks(
    world: Callable, tmp_path: Path
) -> None:
    ended = world(2).run(stopped_by_a_callback, ParallelConfig(dp_shard=2), tmp_path)
    assert [(step, saved) for step, saved, _ in ended] == [(4, ["step_00000004"])] * 2
    assert ended[0][2] == ["stopped after step 4: enough"]


def stop_heard(parallel: ParallelConfig, local_sgd: LocalSgdConfig) -> list[bool]:
    """Returns whether each of two steps was asked to stop; the last rank is asked in the second."""
    recipe = replace(make_recipe(GROUPED, parallel), local_sgd=local_sgd)
    trainer = make_trainer(recipe)
    loader = make_loader(recipe, get_rank())
    is_last = get_rank() == get_world_size() - 1
    first = trainer.train_step(loader.batch(0))
    second = trainer.train_step(loader.batch(1), is_asked_to_stop=is_last)
    return [first.is_asked_to_stop, second.is_asked_to_stop]


@pytest.mark.parametrize(
    "parallel, local_sgd",
    [
        (ParallelConfig(pp=2), LocalSgdConfig()),
        (ParallelConfig(dp_replicate=2), LocalSgdConfig(sync_every=5)),
    ],
    ids=str,
)
def test_all_ranks_hear_in_the_same_step_that_one_is_asked_to_stop(
    world: Callable, parallel: ParallelConfig, local_sgd: LocalSgdConfig
) -> None:
    assert world(2).run(stop_heard, parallel, local_sgd) == [[False, True]] * 2

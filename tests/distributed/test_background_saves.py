"""Saves in the background: what is written is the state of its own step, whatever was trained in
the meantime, and a rank that cannot write ends all ranks after the same step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from parallel3d.checkpoint import files, saver
from parallel3d.checkpoint.saver import Saver
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import CheckpointConfig, LocalSgdConfig, ParallelConfig, Recipe
from parallel3d.errors import SaveError
from parallel3d.launch.signals import StopRequest
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.callbacks import Callbacks, RunView
from parallel3d.training.loop import TrainingLoop
from parallel3d.training.state import load_trainer, state_of
from tests.distributed.training_cases import (
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    long,
    make_loader,
    make_recipe,
    make_trainer,
    train,
)

BACKGROUND = CheckpointConfig(every=1, in_background=True)
DILOCO = LocalSgdConfig(sync_every=4)
RECIPES: dict[str, Recipe] = {
    "tp2-pp2-tied": make_recipe(DEEP_TIED, ParallelConfig(tp=2, pp=2, microbatch_size=2)),
    "hybrid-fp16": make_recipe(
        GROUPED,
        ParallelConfig(dp_replicate=2, dp_shard=2, sharding="HYBRID_SHARD", microbatch_size=2),
        precision="fp16",
    ),
    "local-sgd-pp2": replace(
        make_recipe(
            DEEP_TIED,
            ParallelConfig(
                dp_replicate=2,
                pp=2,
                schedule="zb_v",
                virtual_stages=2,
                microbatch_size=2,
            ),
        ),
        local_sgd=DILOCO,
    ),
}


def train_while_saving(recipe: Recipe, folder: Path) -> tuple[Curve, list[str]]:
    """Saves after steps 3 and 6, each held back until two more steps have been trained; returns the
    curve of nine steps and what was told to be in place before it could be, which is nothing."""
    trainer = make_trainer(recipe)
    told = list[Path]()
    early = list[str]()
    opened = threading.Event()
    write = saver.write_and_commit

    def held_back(*args: object) -> None:
        assert opened.wait(60.0)
        write(*args)  # type: ignore[arg-type]

    curve = train(trainer, 3)
    with (
        mock.patch.object(saver, "write_and_commit", held_back),
        Saver(BACKGROUND, saved=told.append, say=lambda line: None) as saves,
    ):
        for step in (3, 6):
            opened.clear()
            path = folder / f"step_{step:08d}"
            saves.save(*state_of(trainer), path, to_yaml(recipe), is_last=False)
            curve += train(trainer, 2)
            saves.step_done()
            early += [each.name for each in told if each == path]
            opened.set()
            curve += train(trainer, 1)
    assert [path.name for path in told] == ["step_00000003", "step_00000006"]
    assert all(path.is_dir() for path in told)
    return curve, early


def go_on(
    recipe: Recipe,
    path: Path,
    steps: int,
) -> Curve:
    trainer = make_trainer(recipe)
    load_trainer(trainer, path)
    return train(trainer, steps)


@pytest.mark.parametrize("layout", ["hybrid-fp16", *map(long, ("tp2-pp2-tied", "local-sgd-pp2"))])
def test_a_background_save_is_of_its_own_step_to_the_bit(
    world: Callable, tmp_path: Path, layout: str
) -> None:
    recipe = RECIPES[layout]
    answers = world(4).run(train_while_saving, recipe, tmp_path)
    curve, early = answers[0]
    assert len(curve) == 9
    assert early == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000006"]
    assert world(4).run(train_in_peace, recipe)[0] == curve
    for step in (3, 6):
        resumed = world(4).run(go_on, recipe, tmp_path / f"step_{step:08d}", 2)[0]
        assert resumed == curve[step : step + 2]


def train_in_peace(recipe: Recipe) -> Curve:
    return train(make_trainer(recipe), 9)


def fit_where_one_rank_cannot_write(
    folder: Path, in_background: bool
) -> tuple[str, int, list[str]]:
    """Returns the error on this rank, the steps it has trained, and what is left in the folder."""
    recipe = make_recipe(TIED, ParallelConfig(dp_shard=2), steps=40)
    recipe = replace(
        recipe,
        checkpoint=CheckpointConfig(
            every=1,
            keep=9,
            in_background=in_background,
        ),
    )
    trainer = make_trainer(recipe)
    rank = dist.get_rank()
    write = files.write_shard

    def write_shard(partial: Path, *args: object) -> object:
        if rank == 1 and partial.name.startswith("step_00000003"):
            raise OSError(28, "No space left on device")
        return write(partial, *args)  # type: ignore[arg-type]

    loaders = (make_loader(recipe, rank), ())
    callbacks = Callbacks([], RunView(recipe, folder, print))
    with mock.patch.object(files, "write_shard", write_shard), pytest.raises(SaveError) as error:
        TrainingLoop(
            trainer, loaders, folder, None, ProgressDisplay(), StopRequest(), callbacks
        ).fit()
    dist.barrier()
    return str(error.value), trainer.step, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("in_background", [False, True])
def test_all_ranks_end_after_the_same_step_where_one_cannot_write(
    world: Callable, tmp_path: Path, in_background: bool
) -> None:
    (first, second) = world(2).run(fit_where_one_rank_cannot_write, tmp_path, in_background)
    assert first == second
    error, step, left = first
    assert "step_00000003.partial/__1_0.distcp: cannot be written: No space left" in error
    assert step == 3 + in_background
    assert left == ["step_00000001", "step_00000002"]

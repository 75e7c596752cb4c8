"""Spikes: eight sequences of nonsense in the data are found, and the run goes on as if they had
never been there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray

from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.checkpoint.store import list_checkpoints
from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    LocalSgdConfig,
    LoggingConfig,
    ParallelConfig,
    Recipe,
    SequenceRange,
)
from parallel3d.data.loader import Batch
from parallel3d.data.windows import TokenIds, WindowSource
from parallel3d.errors import SpikeError
from parallel3d.launch.signals import StopRequest
from parallel3d.reporting.metrics import MetricsFile
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.callbacks import Callback, Callbacks, RunView
from parallel3d.training.loop import TrainingLoop
from parallel3d.training.state import resume_from
from parallel3d.training.step_result import StepResult
from tests.distributed.training_cases import (
    BATCH,
    GROUPED,
    STEPS,
    VOCAB,
    assert_follows,
    long,
    make_loader,
    make_recipe,
    make_trainer,
    plain_curve,
)

SPIKED = 15
NONSENSE = range((SPIKED - 1) * BATCH, SPIKED * BATCH)  # the eight sequences of step 15
ONE = ParallelConfig(microbatch_size=BATCH)


@dataclass(frozen=True, eq=False)
class WithNonsense:
    """A window source of which some samples are one token again and again, which no text has."""

    source: WindowSource
    nonsense: range

    @property
    def windows(self) -> int:
        return self.source.windows

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        ids = self.source.draw(samples).copy()
        ids[np.isin(samples, self.nonsense)] = VOCAB - 1
        return ids


def spiky_recipe(parallel: ParallelConfig, on_spike: str, **train: object) -> Recipe:
    recipe = make_recipe(
        GROUPED,
        parallel,
        on_spike=on_spike,
        spike_window=8,
        spike_loss_ratio=1.05,
        **train,
    )
    return replace(recipe, checkpoint=CheckpointConfig(every=6), logging=LoggingConfig(every=1))


class Told(Callback):
    """Remembers the loss and the norm of each step that is not undone, and the steps that the run
    goes back to."""

    def __init__(self) -> None:
        self.curve: dict[int, tuple[float, float]] = {}
        self.back_at: list[int] = []

    def step_done(self, run: RunView, result: StepResult) -> None:
        if run.step <= max(self.curve, default=0):
            self.back_at.append(run.step - 1)
            self.curve = {step: seen for step, seen in self.curve.items() if step < run.step}
        self.curve[run.step] = result.loss, result.grad_norm


@dataclass(frozen=True)
class Ended:
    """What a run has left behind; rank 0 knows all of it."""

    curve: dict[int, tuple[float, float]]  # the steps of this process
    back_at: list[int]
    said: list[str]
    skipped_ranges: tuple[SequenceRange, ...]
    skipped_steps: int
    error: str


def run(
    recipe: Recipe,
    folder: Path,
    nonsense: range = NONSENSE,
    *,
    killed_in: int | None = None,
) -> Ended:
    """Trains to the end, from the newest checkpoint if there is one, as a worker does. `killed_in`
    is the number of the step, of this process, in which all ranks end without a word."""
    rank = dist.get_rank()
    checkpoints = folder / "checkpoints"
    if rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    trainer = make_trainer(recipe)
    if found := list_checkpoints(checkpoints)[::-1]:
        resume_from(trainer, found, checkpoints)
    train_step = trainer.train_step
    begun = 0

    def step(batch: Batch, **settings: Any) -> StepResult:
        nonlocal begun
        begun += 1
        if begun == killed_in:
            raise KeyboardInterrupt
        return train_step(batch, **settings)

    trainer.train_step = step  # type: ignore[assignment]
    loader = make_loader(recipe, rank)
    loader = replace(loader, source=WithNonsense(loader.source, nonsense))
    told = Told()
    said = list[str]()
    progress = ProgressDisplay()
    error = ""
    progress.say = said.append  # type: ignore[method-assign]
    metrics = None
    view = RunView(recipe, folder, said.append, trainer.step)
    if rank == 0:
        metrics = MetricsFile(folder / "metrics.jsonl", resumed_step=trainer.step)
    try:
        TrainingLoop(
            trainer,
            (loader, ()),
            checkpoints,
            metrics,
            progress,
            StopRequest(),
            Callbacks([told], view),
        ).fit()
    except (SpikeError, KeyboardInterrupt) as ended:
        error = str(ended)
    return Ended(
        told.curve,
        told.back_at,
        said,
        trainer.skipped_ranges.ranges,
        trainer.progress.skipped_steps,
        error,
    )


def rolled_back_and_without(recipe: Recipe, folder: Path) -> tuple[Ended, Ended]:
    """Returns a run that goes back, and one that leaves out the nonsense from the start."""
    skip = SequenceRange(first=NONSENSE.start, last=NONSENSE.stop - 1)
    return run(recipe, folder / "straight"), run(
        replace(recipe, data=DataConfig(skip=(skip,))), folder / "without"
    )


LAYOUTS = [
    long(ONE, {}),
    (
        ParallelConfig(dp_shard=2, microbatch_size=4),
        {"checkpoint": CheckpointConfig(every=6, in_background=True)},
    ),
    (
        ParallelConfig(dp_replicate=2, microbatch_size=2),
        {"local_sgd": LocalSgdConfig(sync_every=4)},
    ),
]


@pytest.mark.parametrize("parallel, settings", LAYOUTS, ids=["one", "dp2-background", "local-sgd"])
def test_a_run_goes_on_as_if_the_nonsense_had_not_been_there(
    world: Callable, tmp_path: Path, parallel: ParallelConfig, settings: dict[str, Any]
) -> None:
    recipe = replace(spiky_recipe(parallel, "rollback", spike_steps=1), **settings)
    straight, without = world(parallel.world_size).run(rolled_back_and_without, recipe, tmp_path)[0]
    assert straight.back_at == [12]
    assert without.back_at == []
    assert straight.curve == without.curve  # to the bit
    assert straight.skipped_ranges == without.skipped_ranges
    assert straight.skipped_steps == 0
    if "local_sgd" not in settings:
        everywhere = plain_curve(
            replace(recipe, data=DataConfig(skip=without.skipped_ranges)), STEPS
        )
        assert_follows(list(straight.curve.values()), everywhere)
    said = [line for line in straight.said if "waits until" not in line]  # said by a slow disk
    assert said[0].startswith(f"warning: step {SPIKED}: a spike: ")
    assert said[1:] == [
        "rolling back; skipping sequences 112 to 119",
        f"resumed at step 12 from {tmp_path / 'straight/checkpoints/step_00000012'}",
    ]
    lines = (tmp_path / "straight/metrics.jsonl").read_text().splitlines()
    rollbacks = [json.loads(line)["rollbacks"] for line in lines]
    assert rollbacks == [0] * 12 + [1] * (STEPS - 12)
    saved = read_manifest(tmp_path / "straight/checkpoints/step_00000020").progress
    assert saved.skip == ()
    assert saved.skipped_by_rollbacks == without.skipped_ranges
    assert saved.spikes.spikes == 1
    assert saved.spikes.rollbacks == 1
    assert saved.spikes.last_spike == SPIKED


def killed_and_resumed(recipe: Recipe, folder: Path) -> tuple[Ended, Ended, Ended]:
    """Returns a run that goes back, another that is killed in the second step after that, and its
    resume."""
    return (
        run(recipe, folder / "straight"),
        run(recipe, folder / "killed", killed_in=SPIKED + 2),
        run(recipe, folder / "killed"),
    )


def test_a_run_that_is_killed_after_it_went_back_resumes_to_the_bit(
    world: Callable, tmp_path: Path
) -> None:
    recipe = spiky_recipe(ParallelConfig(pp=2, microbatch_size=2), "rollback")
    straight, killed, resumed = world(2).run(killed_and_resumed, recipe, tmp_path)[0]
    assert straight.back_at == killed.back_at == [12]
    assert resumed.back_at == []
    assert resumed.curve == {step: straight.curve[step] for step in range(13, STEPS + 1)}
    two_steps = SequenceRange(first=104, last=119)
    assert resumed.skipped_ranges == straight.skipped_ranges == (two_steps,)


def spikes_by_what_is_done(folder: Path) -> dict[str, Ended]:
    recipe = spiky_recipe(ONE, "skip")
    early = range(4 * BATCH, 5 * BATCH)
    once = spiky_recipe(ONE, "skip", spikes_in_a_row=1)
    resumed = run(recipe, folder / "killed", killed_in=STEPS)
    return {
        "warn": run(spiky_recipe(ONE, "warn"), folder / "warn"),
        "skip": run(recipe, folder / "skip"),
        "resumed": replace(run(recipe, folder / "killed"), said=resumed.said),
        "too many": run(once, folder / "many", range(NONSENSE.start, NONSENSE.stop + BATCH)),
        "early": run(spiky_recipe(ONE, "rollback"), folder / "early", early),
    }


def test_a_spike_is_told_or_left_out_or_too_many(world: Callable, tmp_path: Path) -> None:
    (ended,) = world(1).run(spikes_by_what_is_done, tmp_path)
    warned = ended["warn"]
    skipped = ended["skip"]
    assert len(warned.said) == 1
    assert warned.skipped_steps == 0
    assert skipped.said == [f"{warned.said[0]}; step skipped"]
    assert skipped.skipped_steps == 1
    same = [step for step in warned.curve if warned.curve[step] == skipped.curve[step]]
    assert same == list(range(1, SPIKED + 1))
    assert ended["resumed"].curve == {step: skipped.curve[step] for step in (19, 20)}
    assert ended["resumed"].skipped_steps == 1
    assert "2 spikes in a row, more than train.spikes_in_a_row = 1" in ended["too many"].error
    early = ended["early"]
    assert early.said[1:] == ["no checkpoint to roll back to yet; the run continues"]
    assert list(early.curve) == list(range(1, STEPS + 1))
    assert early.skipped_steps == 1

"""A rank that computes more than its peers is named in the metrics and warned of, and the run goes
on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from parallel3d.config.recipe import LoggingConfig, ParallelConfig
from parallel3d.launch.signals import StopRequest
from parallel3d.reporting.metrics import MetricsFile
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.callbacks import Callbacks
from parallel3d.training.loop import TrainingLoop
from tests.distributed.training_cases import GROUPED, make_loader, make_recipe, make_trainer


def with_a_busy_rank(folder: Path) -> tuple[int, list[str]]:
    """Returns how many lines of metrics name rank 1 with a ratio above 1.5, and what is said."""
    recipe = make_recipe(GROUPED, ParallelConfig(dp_shard=2, microbatch_size=4), steps=24)
    trainer = make_trainer(replace(recipe, logging=LoggingConfig(every=1)))
    rank = dist.get_rank()
    if rank == 1:
        apply = trainer.update.apply

        def apply_slowly(factor: float) -> None:
            apply(factor)
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass

        trainer.update.apply = apply_slowly  # type: ignore[method-assign]
    said = ProgressDisplay()
    said.say = (lines := []).append  # type: ignore[method-assign]
    file = MetricsFile(folder / f"{rank}.jsonl", resumed_step=0)
    TrainingLoop(
        trainer,
        (make_loader(trainer.recipe, rank), ()),
        folder,
        file,
        said,
        StopRequest(),
        Callbacks(),
    ).fit()
    assert trainer.step == 24
    metrics = MetricsFile(folder / f"{rank}.jsonl", resumed_step=24).history
    return sum(
        line["slowest_rank"] == 1 and (line["slowest_ratio"] or 0) > 1.5 for line in metrics
    ), lines


def test_a_slow_rank_is_named(world: Callable, tmp_path: Path) -> None:
    (count, said), other = world(2).run(with_a_busy_rank, tmp_path)
    assert (count, said) == other and count >= 12
    assert any(
        line.startswith("warning: rank 1 (") and "dp_shard 1, tp 0) is slow: its work" in line
        for line in said
    )

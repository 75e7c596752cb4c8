"""Measured timelines: every action of a step on every rank, beside the simulation, in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from parallel3d.config.recipe import ParallelConfig
from parallel3d.schedules.build import build_schedule
from parallel3d.training.timeline import traced_step
from tests.distributed.training_cases import GROUPED, make_recipe, make_trainer, own_batch, train

PARALLEL = ParallelConfig(
    pp=2,
    tp=2,
    schedule="zb_h1",
    microbatch_size=2,
)


def trace(folder: Path) -> tuple[list[str], list[float], list[float]]:
    """The report, and the losses of three steps of which the second is traced, and of three of
    which none is."""
    traced, plain = (make_trainer(make_recipe(GROUPED, PARALLEL)) for _ in range(2))
    losses = [loss for loss, _ in train(traced, 1)]
    batch = own_batch(traced.recipe, traced.step)
    said: list[str] = []
    result = traced_step(traced, batch, folder, said.append)
    losses += [result.loss, *(loss for loss, _ in train(traced, 1))]
    return said, losses, [loss for loss, _ in train(plain, 3)]


def test_a_step_is_recorded_on_all_ranks_and_simulated(world: Callable, tmp_path: Path) -> None:
    answers = world(4).run(trace, tmp_path)
    for _, traced, plain in answers:
        assert traced == plain
    (report,) = answers[0][0]
    path = tmp_path / "timeline_step_00000002.json"
    assert report.endswith(f"the measured durations; {path}")
    for other, _, _ in answers[1:]:
        assert not other
    events = json.loads(path.read_text())["traceEvents"]
    schedule = build_schedule("zb_h1", pp=2, microbatches=4)
    expected = sorted(str(action) for actions in schedule.ranks for action in actions)
    for process in range(3):  # the pipelines of two tensor ranks, and the simulation
        names = sorted(
            event["name"] for event in events if event["ph"] == "X" and event["pid"] == process
        )
        assert names == expected

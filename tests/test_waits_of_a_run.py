"""Every process group of a run, on the mesh and beside it, waits train.start_timeout_s until the
first step is done, and train.timeout_s from then on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_restarts import ENVIRONMENT, STEPS, write_recipe

from parallel3d.config.recipe import ParallelConfig


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        ParallelConfig(pp=2, tp=2),
        ParallelConfig(dp_replicate=2, dp_shard=2),
        ParallelConfig(dp_shard=2, tp=2, sequence_parallel=True),
    ],
    ids=["pp2_tp2", "dp_replicate2_dp_shard2", "dp_shard2_tp2"],
)
def test_each_group_waits_as_long_as_the_recipe_says(
    layout: ParallelConfig, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, "run", layout, in_background=True)
    model = "model.architecture=waits_callback:WritesInTheFirstForward"
    callback = "train.callbacks=[waits_callback:WritesAfterEachStep]"
    settings = (model, callback, "train.start_timeout_s=97", "train.timeout_s=83")
    command = [sys.executable, "-m", "parallel3d.recipes.pretrain", str(recipe), *settings]
    subprocess.run(command, env=ENVIRONMENT, check=True, cwd=tmp_path)
    first, *later = map(json.loads, (tmp_path / "waits").read_text().splitlines())
    axes = {axis for axis, size in layout.axes.items() if size > 1}
    assert {"default_pg", "saves", *(f"mesh_{axis}" for axis in axes)} <= set(first)
    assert set(first.values()) == {97_000}
    assert len(later) == STEPS
    assert all(set(waits) == set(first) and set(waits.values()) == {83_000} for waits in later)

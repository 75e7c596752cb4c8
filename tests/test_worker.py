"""A worker of a run in this process: what is switched on while it trains, and what it leaves out
where it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import CheckpointConfig, Recipe
from parallel3d.models.llama import Llama
from parallel3d.training.worker import run_worker
from tests.one_rank import SMALL, one_rank

RECIPE = replace(
    SMALL,
    train=replace(SMALL.train, steps=2, deterministic=True),
    checkpoint=CheckpointConfig(every=1, resume="auto"),
)
SEEN: list[bool] = []


class Watched(Llama):
    """Notes at each forward whether torch was told to be deterministic."""

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        SEEN.append(torch.are_deterministic_algorithms_enabled())
        return super().forward(x, key)


def run(recipe: Recipe, folder: Path) -> None:
    recipe = replace(recipe, run_dir=str(folder / "run"))
    run_worker(recipe, one_rank(folder), Watched, lambda name, precision: None)


def test_a_worker_is_deterministic_and_draws_no_weights_where_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    SEEN.clear()
    run(replace(RECIPE, train=replace(RECIPE.train, steps=1)), tmp_path)
    assert SEEN
    assert all(SEEN)
    assert not torch.are_deterministic_algorithms_enabled()
    with mock.patch(
        "parallel3d.build_engine.initial_part", side_effect=AssertionError("weights were drawn")
    ):
        run(RECIPE, tmp_path)
        with pytest.raises(AssertionError, match="weights were drawn"):
            run(replace(RECIPE, checkpoint=CheckpointConfig()), tmp_path)
    dist.destroy_process_group()  # after an error a worker leaves it open, and ends

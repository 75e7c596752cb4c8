"""A checkpoint belongs to no layout: what one saves, every other loads and saves again, bit for
bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.training.state import load_trainer
from tests.distributed.training_cases import TIED, make_recipe, make_trainer, save_trainer, train

# Two ends that are tied, and a vocabulary that neither tp nor the data ranks divide.
MODEL: ModelConfig = replace(TIED, layers=4, vocab=131)
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp_shard=2),
    "tp2-pp2": ParallelConfig(tp=2, pp=2),
    "tp2-dp2": ParallelConfig(tp=2, dp_shard=2),
    "pp2-v2": ParallelConfig(
        pp=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
    ),
    "tp2-pp2-dp2-hybrid": ParallelConfig(
        tp=2,
        pp=2,
        dp_replicate=2,
        sharding="HYBRID_SHARD",
    ),
}


def trained(parallel: ParallelConfig, path: Path) -> None:
    """Saves a run of two steps, after which no parameter and no state has a value that it started
    with."""
    trainer = make_trainer(make_recipe(MODEL, replace(parallel, microbatch_size=2)))
    train(trainer, 2)
    save_trainer(trainer, path)


def loaded_and_saved(
    parallel: ParallelConfig,
    pairs: list[tuple[Path, Path]],
) -> None:
    """Loads each first path into a trainer and saves it as the second."""
    trainer = make_trainer(make_recipe(MODEL, parallel), initialize=False)
    for there, here in pairs:
        for parameter in trainer.parameters:
            states = trainer.optimizer.state[parameter.local].values()
            for tensor in (parameter.local.detach(), *(state for state in states if state.ndim)):
                tensor.fill_(float("nan"))
        load_trainer(trainer, there)
        save_trainer(trainer, here)


def global_tensors(path: Path) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint as the files have it, put together from its parts."""
    tensors = {
        name: torch.full(tensor.shape, float("nan"), dtype=getattr(torch, tensor.dtype))
        for name, tensor in read_manifest(path).tensors.items()
    }
    dcp.load(dict(tensors), checkpoint_id=path, no_dist=True)  # torch's own reader, as a referee
    return tensors


@pytest.fixture(scope="module")
def saved(world: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each layout, by the layout's name."""
    folder = tmp_path_factory.mktemp("saved")
    for name, parallel in LAYOUTS.items():
        world(parallel.world_size).run(trained, parallel, folder / name)
    return {name: folder / name for name in LAYOUTS}


@pytest.mark.parametrize(
    "into",
    [pytest.param(name, marks=[] if name == "tp2-pp2" else pytest.mark.long) for name in LAYOUTS],
)
def test_every_layout_saves_again_what_any_layout_saved(
    world: Callable, saved: dict[str, Path], tmp_path: Path, into: str
) -> None:
    parallel = LAYOUTS[into]
    pairs = [(path, tmp_path / name) for name, path in saved.items()]
    world(parallel.world_size).run(loaded_and_saved, parallel, pairs)
    for there, here in pairs:
        first = global_tensors(there)
        again = global_tensors(here)
        assert first.keys() == again.keys() and len(first) == 3 * (4 * 9 + 2), there.name
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]) and tensor.isfinite().all(), (there.name, name)

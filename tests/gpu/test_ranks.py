"""Several ranks. If the host has fewer GPUs than ranks, they share one, each as if on a host of its
own: the communicators, streams and kernels of NCCL are real, and its speed says nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
from parallel3d.errors import RankError
from parallel3d.launch.local import launch_local
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.tools.bench.step import random_batch
from parallel3d.tools.local_ranks import device_of_rank, own_device, run_ranks
from tests.gpu.conftest import Measure
from tests.gpu.training import (
    Kernel,
    Trained,
    kernels_of,
    make_trainer,
    overlapping,
    small,
    train,
)

LAYOUTS = {
    "tp 2": ParallelConfig(tp=2),
    "tp 2, sequence parallel": ParallelConfig(tp=2, sequence_parallel=True),
    "cp 2": ParallelConfig(cp=2),
    "cp 2 x tp 2, sequence parallel": ParallelConfig(cp=2, tp=2, sequence_parallel=True),
    "NO_SHARD": ParallelConfig(dp_shard=2, sharding="NO_SHARD"),
    "SHARD_OPTIMIZER": ParallelConfig(dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "FULL_SHARD": ParallelConfig(dp_shard=2),
    "1f1b": ParallelConfig(pp=2),
    "gpipe": ParallelConfig(pp=2, schedule="gpipe"),
    "interleaved_1f1b": ParallelConfig(
        pp=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
    ),
    "zb_h1": ParallelConfig(pp=2, schedule="zb_h1"),
    "zb_v": ParallelConfig(pp=2, schedule="zb_v", virtual_stages=2),
    "1f1b, pp 3": ParallelConfig(pp=3),
    "1f1b, tp 2 x pp 2": ParallelConfig(tp=2, pp=2),
}


def sum_of_ranks() -> float:
    x = torch.full((4,), float(dist.get_rank() + 1), device=own_device("cuda"))
    dist.all_reduce(x)
    return float(x[0])


@pytest.fixture(scope="module")
def nccl() -> None:
    """Skips if NCCL refuses two ranks on one GPU, which NVIDIA does not support."""
    try:
        total = run_ranks(sum_of_ranks, world_size=2, device="cuda")
    except RankError as error:
        if torch.cuda.device_count() >= 2:
            raise
        pytest.skip(f"NCCL refuses two ranks on one GPU: {error}")
    assert total == 3.0


@pytest.fixture(scope="module")
def alone() -> Trained:
    return run_ranks(train, {"": small()}, "cuda", world_size=1, device="cuda")[""]


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_rank(name: str, alone: Trained) -> None:
    recipe = small(parallel=LAYOUTS[name])
    ranks = recipe.parallel.world_size
    found = run_ranks(train, {name: recipe}, "cuda", world_size=ranks, device="cuda")
    found[name].assert_follows(alone, loss=1e-5, norm=1e-4)


def trace(recipe: Recipe) -> list[Kernel]:
    trainer = make_trainer(recipe, "cuda")
    batches = [random_batch(recipe, dist.get_rank(), seed) for seed in range(3)]
    for batch in batches[:2]:
        trainer.train_step(batch)
    return kernels_of(lambda: trainer.train_step(batches[2]))


@pytest.mark.usefixtures("nccl")
def test_tensor_parallel_collectives_overlap_matmuls(measured: Measure) -> None:
    model = ModelConfig(
        layers=4,
        hidden=2048,
        heads=16,
        kv_heads=8,
        ffn_hidden=8192,
        vocab=2048,
    )
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    recipe = small(
        model,
        parallel,
        global_batch_size=2,
        seq_len=2048,
        precision="bf16",
    )
    kernels = run_ranks(trace, recipe, world_size=2, device="cuda")
    collectives = [kernel for kernel in kernels if kernel.is_collective]
    others = [kernel for kernel in kernels if not kernel.is_collective]
    scatters = [kernel for kernel in collectives if "ReduceScatter" in kernel.name]
    measured("collectives", len(collectives))
    assert measured("overlapping", overlapping(collectives, others)) >= 1
    assert measured("overlapping reduce-scatters", overlapping(scatters, others)) >= 1


PLANTED = "an error that this test has planted"


def train_and_fail(recipe: Recipe, rendezvous: Rendezvous, is_killed: bool) -> None:
    """Trains two steps. Then rank 1 fails, and rank 0 goes on until it notices."""
    device_of_rank("cuda", rendezvous.rank, rendezvous.world_size)  # lets ranks share a GPU
    rank = rendezvous.rank
    with process_group(recipe, rendezvous) as device:
        trainer = make_trainer(replace(recipe, run_dir=None), device.type)
        for seed in range(2):
            trainer.train_step(random_batch(recipe, rank, seed))
        while rank == 0:
            trainer.train_step(random_batch(recipe, rank, 2))
        assert recipe.run_dir is not None
        (Path(recipe.run_dir) / "failed_at").write_text(str(time.time()))
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(PLANTED)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("is_killed, cause", [(False, PLANTED), (True, "SIGKILL")])
def test_a_rank_that_fails_ends_all(
    is_killed: bool, cause: str, tmp_path: Path, measured: Measure
) -> None:
    recipe = small(parallel=ParallelConfig(dp_shard=2), device="cuda")
    recipe = replace(recipe, run_dir=str(tmp_path))
    target = f"{__name__}:train_and_fail"
    status = launch_local(target, recipe, 2, arguments=(is_killed,), preload=("torch", __name__))
    took_s = time.time() - float((tmp_path / "failed_at").read_text())
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert status == RankError.exit_status
    assert outcome["rank"] == 1
    assert cause in outcome["reason"]
    assert measured("s to the end", took_s) <= 20.0

"""A12 to A14: several ranks. Where the host has fewer GPUs than ranks they share one, each as if on a host of its own:
NCCL's communicators, streams and kernels are the real ones, and its speed says nothing."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
from parallel3d.errors import RankError
from parallel3d.launch.local import launch_local
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.tools.bench.harness import device_of_rank, own_device
from parallel3d.tools.bench.step import random_batch
from parallel3d.tools.clock import DeviceClock
from parallel3d.tools.gpu_check.findings import Findings, NotPossible
from parallel3d.tools.gpu_check.jobs import (
    LLAMA,
    compare,
    make_trainer,
    on_ranks,
    small,
    stacks_after,
    train,
)
from parallel3d.tools.gpu_check.traces import Kernel, kernels_of, overlapped

_STEPS = 3
_LONGEST_END_S = 20.0
_PLANTED = "an error that this check has planted"
TENSOR_AND_DATA = {
    "tp 2": ParallelConfig(tp=2),
    "tp 2, sequence parallel": ParallelConfig(tp=2, sequence_parallel=True),
    "NO_SHARD": ParallelConfig(dp_shard=2, sharding="NO_SHARD"),
    "SHARD_OPTIMIZER": ParallelConfig(dp_shard=2, sharding="SHARD_OPTIMIZER"),
    "FULL_SHARD": ParallelConfig(dp_shard=2),
}
PIPELINES = {
    "1f1b": ParallelConfig(pp=2),
    "gpipe": ParallelConfig(pp=2, schedule="gpipe"),
    "interleaved_1f1b": ParallelConfig(pp=2, schedule="interleaved_1f1b", virtual_stages=2),
    "zb_h1": ParallelConfig(pp=2, schedule="zb_h1"),
    "zb_v": ParallelConfig(pp=2, schedule="zb_v", virtual_stages=2),
    "1f1b, pp 3": ParallelConfig(pp=3),
    "1f1b, tp 2 x pp 2": ParallelConfig(tp=2, pp=2),
}


def all_reduce(findings: Findings) -> None:
    """A12a: sums a tensor over two ranks. That NCCL refuses two ranks on one GPU is no fault of this project."""
    try:
        total = on_ranks(findings, _sum_of_ranks, findings.device, world_size=2)
    except RankError as error:
        if findings.on_gpu and torch.cuda.device_count() < 2:
            raise NotPossible(f"NCCL refuses two ranks on one GPU: {error}") from error
        raise
    findings.holds("1 + 2 = 3", total == 3.0)


def _sum_of_ranks(device: str) -> float:
    x = torch.full((4,), float(dist.get_rank() + 1), device=own_device(device))
    dist.all_reduce(x)
    return float(x[0])


def tensor_and_data(findings: Findings) -> None:
    """A12b: trains in tensor parallel and sharded layouts beside one rank."""
    _compare_layouts(findings, TENSOR_AND_DATA)


def pipelines(findings: Findings) -> None:
    """A12c: trains in pipelines beside one rank."""
    _compare_layouts(findings, PIPELINES)


def _compare_layouts(findings: Findings, layouts: dict[str, ParallelConfig]) -> None:
    alone = on_ranks(findings, train, {"one rank": small()}, findings.device, _STEPS)["one rank"]
    for world_size in sorted({parallel.world_size for parallel in layouts.values()}):
        recipes = {
            name: small(parallel=parallel) for name, parallel in layouts.items() if parallel.world_size == world_size
        }
        found = on_ranks(findings, train, recipes, findings.device, _STEPS, world_size=world_size)
        for name, trained in found.items():
            compare(findings, name, trained, alone, loss=1e-5, norm=1e-4)


def overlap(findings: Findings) -> None:
    """A12d: traces a step with tensor and sequence parallelism. Some reduce-scatters must start before the products of
    the weights' gradients, on another stream, so that both run at the same time."""
    model = ModelConfig(layers=4, hidden=2048, heads=16, kv_heads=8, ffn_hidden=8192, vocab=2048)
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    model, seq = (model, 2048) if findings.on_gpu else (LLAMA, 64)
    recipe = small(model, parallel, global_batch_size=2, seq_len=seq, precision="bf16")
    kernels = on_ranks(findings, _traced, recipe, findings.device, world_size=2)
    findings.at_least("kernels", len(kernels), 1)
    count, beside, share = overlapped(kernels)
    streams = {k.stream for k in kernels if k.is_collective} & {k.stream for k in kernels if not k.is_collective}
    findings.at_least("collectives", count, 1, gpu_only=True)
    findings.note("streams that collectives share with products", len(streams))
    findings.note("share of their time beside products", share)
    findings.at_least("collectives beside products", beside, 1, gpu_only=True)
    scatters = [kernel for kernel in kernels if "ReduceScatter" in kernel.name]
    rest = [kernel for kernel in kernels if not kernel.is_collective]
    findings.at_least("reduce-scatters beside products", overlapped([*scatters, *rest])[1], 1, gpu_only=True)


def _traced(recipe: Recipe, device: str) -> list[Kernel]:
    trainer = make_trainer(recipe, device)
    batches = [random_batch(recipe, dist.get_rank(), seed) for seed in range(3)]
    for batch in batches[:2]:
        trainer.train_step(batch)
    return kernels_of(lambda: trainer.train_step(batches[2]), device)


def failures(findings: Findings) -> None:
    """A13: starts two ranks as `parallel3d-train` does, of which one raises, or is killed, after two steps."""
    for target, told in (("raises", _PLANTED), ("is_killed", "SIGKILL")):
        with tempfile.TemporaryDirectory(prefix="parallel3d-gpu-check-") as folder:
            device = "cuda" if findings.on_gpu else "cpu"
            recipe = replace(small(parallel=ParallelConfig(dp_shard=2), device=device), run_dir=folder)
            preload = ("torch", "torch._dynamo", __name__)
            with stacks_after(findings.left_s - 2.0):
                status = launch_local(f"{__name__}:{target}", recipe, 2, preload=preload)
            ended_at = time.time()
            outcome = json.loads((Path(folder) / "outcome.json").read_text())
            began_at = float((Path(folder) / "failed_at").read_text())
        findings.at_most(f"{target}: to the end, s", ended_at - began_at, _LONGEST_END_S)
        findings.holds(f"{target}: the status is {RankError.exit_status}", status == RankError.exit_status)
        findings.holds(f"{target}: rank 1 and its cause are named", outcome["rank"] == 1 and told in outcome["reason"])


def raises(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Trains on a rank, until rank 1 raises after two steps."""
    with _ready_to_fail(recipe, rendezvous):
        raise ValueError(_PLANTED)


def is_killed(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Trains on a rank, until rank 1 is killed after two steps."""
    with _ready_to_fail(recipe, rendezvous):
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _ready_to_fail(recipe: Recipe, rendezvous: Rendezvous) -> Iterator[None]:
    """Trains two steps, notes the time, and runs the block on rank 1. Rank 0 goes on, and loses its peer."""
    device_of_rank(recipe.train.device, rendezvous.rank, rendezvous.world_size)  # lets ranks share a GPU
    rank = rendezvous.rank
    with stacks_after(_LONGEST_END_S), process_group(recipe, rendezvous) as device:
        trainer = make_trainer(replace(recipe, run_dir=None), device.type)
        for seed in range(2):
            trainer.train_step(random_batch(recipe, rank, seed))
        while rank == 0:
            trainer.train_step(random_batch(recipe, rank, 2))
        assert recipe.run_dir is not None
        (Path(recipe.run_dir) / "failed_at").write_text(str(time.time()))
        yield


def posted_receive(findings: Findings) -> None:
    """A14: times a product while a receive waits for its sender, and runs kernels for the first time beside it."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-gpu-check-") as folder:
        side = 8192 if findings.on_gpu else 256
        alone, beside, known, first = on_ranks(findings, _beside_a_receive, findings.device, folder, side, world_size=2)
    findings.note("product alone, ms", alone * 1e3)
    findings.note("product beside a receive, ms", beside * 1e3)
    findings.note("tax", beside / alone - 1)
    findings.at_most("kernels used before, s", known, 1.0)
    findings.note(
        "kernels never used before, s", first
    )  # where it is the sender's patience, they waited for the message


def _beside_a_receive(device_type: str, folder: str, side: int) -> tuple[float, float, float, float]:
    """Returns, on rank 0, the seconds of a product without and with a receive posted, and then those of kernels that
    were used before, and of kernels that were not. The sender has not sent until then, or for some seconds."""
    device, done = own_device(device_type), Path(folder) / "done"
    x, message = torch.randn(side, side, device=device), torch.ones(4, device=device)
    clock = DeviceClock(device)
    if dist.get_rank() == 1:
        dist.send(message, 0)  # the first message makes the communicator
        for _ in range(300):
            if not done.exists():
                time.sleep(0.02)
        dist.send(message, 0)
        return 0.0, 0.0, 0.0, 0.0

    def seconds_of(work: Callable[[Tensor], Tensor]) -> float:
        start = time.perf_counter()
        float(work(x[:8, :8]).sum())
        return time.perf_counter() - start

    dist.recv(message, 1)
    x @ x
    seconds_of(torch.tanh)
    alone = clock.seconds(lambda: x @ x, 3)
    receive = dist.irecv(message, 1)
    assert receive is not None
    beside = clock.seconds(lambda: x @ x, 3)
    known, first = seconds_of(torch.tanh), seconds_of(torch.special.bessel_j0)
    done.touch()
    receive.wait()
    return alone, beside, known, first

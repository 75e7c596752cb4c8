"""Short trainings of small recipes on ranks, and what a GPU ran in them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.reporting.metrics import gpu_bytes
from parallel3d.tools.bench.step import random_batch
from parallel3d.tools.local_ranks import own_device
from parallel3d.training.trainer import Trainer

STEPS = 5
LLAMA = ModelConfig(
    layers=6,
    hidden=128,
    heads=4,
    kv_heads=2,
    ffn_hidden=256,
    vocab=512,
)
GPT = ModelConfig(
    architecture="gpt",
    layers=6,
    hidden=128,
    heads=4,
    ffn_hidden=256,
    vocab=512,
    max_positions=64,
)


def small(
    model: ModelConfig = LLAMA,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    **train: Any,
) -> Recipe:
    """Returns a recipe that trains in a moment. Its batch fits pipelines of 2, 3 and 4 ranks."""
    settings = {"steps": 1000, "global_batch_size": 12, "seq_len": 64, **train}
    recipe = Recipe(
        model=model,
        parallel=parallel or ParallelConfig(),
        train=TrainConfig(**settings),
        optimizer=optimizer or OptimizerConfig(lr=1e-3),
    )
    validate(recipe)
    return recipe


@dataclass(frozen=True)
class Trained:
    """Loss and gradient norm of each step, the same on every rank."""

    losses: list[float]
    norms: list[float]
    skipped_steps: int

    def assert_follows(self, other: Trained, *, loss: float, norm: float) -> None:
        """Compares step by step, relative to the other training."""
        for mine, theirs in zip(self.losses, other.losses, strict=True):
            assert abs(mine / theirs - 1) <= loss
        for mine, theirs in zip(self.norms, other.norms, strict=True):
            assert abs(mine / theirs - 1) <= norm

    def last_loss_off(self, other: Trained) -> float:
        return abs(self.losses[-1] / other.losses[-1] - 1)


def make_trainer(recipe: Recipe, device: str) -> Trainer:
    return Trainer(
        recipe,
        mesh=build_mesh(recipe.parallel, device),
        device=own_device(device),
        model_class=model_class(recipe.model.architecture),
        gpu_bytes=gpu_bytes(own_device(device)),
    )


def train(recipes: dict[str, Recipe], device: str) -> dict[str, Trained]:
    """Trains each recipe on random tokens. Runs on every rank."""
    found = {}
    for name, recipe in recipes.items():
        print(f"training {name}", flush=True)  # the log of a hang ends with it
        trainer = make_trainer(recipe, device)
        rank = dist.get_rank()
        results = [trainer.train_step(random_batch(recipe, rank, seed)) for seed in range(STEPS)]
        losses = [result.loss for result in results]
        norms = [result.grad_norm for result in results]
        found[name] = Trained(losses, norms, trainer.progress.skipped_steps)
    return found


@dataclass(frozen=True)
class Kernel:
    """A kernel that a GPU ran, in microseconds."""

    name: str
    stream: int
    start: float
    end: float

    @property
    def is_collective(self) -> bool:
        return "nccl" in self.name.lower()

    def overlaps(self, other: Kernel) -> bool:
        return self.stream != other.stream and self.start < other.end and other.start < self.end


def kernels_of(work: Callable[[], object]) -> list[Kernel]:
    """Returns the kernels that `work` runs."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            work()
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = []
    for event in events:
        if event.get("cat") == "kernel" and event.get("ph") == "X":
            start = event["ts"]
            stream = event["args"]["stream"]
            found.append(Kernel(event["name"], stream, start, start + event["dur"]))
    return found


def overlapping(collectives: Sequence[Kernel], others: Sequence[Kernel]) -> int:
    """Returns how many collectives run at the same time as a kernel of another stream."""
    return sum(any(one.overlaps(other) for other in others) for one in collectives)

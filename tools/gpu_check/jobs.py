"""What the checks run on ranks, and how: a training of small recipes on each, and the stacks of ranks that hang."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.config.rules import validate
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.reporting.metrics import gpu_bytes
from parallel3d.tools.bench.harness import own_device, run_ranks
from parallel3d.tools.bench.step import random_batch
from parallel3d.tools.gpu_check.findings import Findings
from parallel3d.tools.gpu_check.runner import STACKS_BEFORE_S
from parallel3d.training.trainer import Trainer

T = TypeVar("T")
Curve = list[tuple[float, float]]  # (loss, gradient norm) of each step
STEPS = 5
LLAMA = ModelConfig(layers=6, hidden=128, heads=4, kv_heads=2, ffn_hidden=256, vocab=512)
GPT = ModelConfig(architecture="gpt", layers=6, hidden=128, heads=4, ffn_hidden=256, vocab=512, max_positions=64)


def small(
    model: ModelConfig = LLAMA,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    **train: Any,
) -> Recipe:
    """Returns a recipe that trains in a moment, checked by the rules; its batch fits pipelines of 2, 3 and 4 ranks."""
    settings = {"steps": 1000, "global_batch_size": 12, "seq_len": 64, **train}
    optimizer = optimizer or OptimizerConfig(lr=1e-3)
    parallel = parallel or ParallelConfig()
    recipe = Recipe(model=model, parallel=parallel, train=TrainConfig(**settings), optimizer=optimizer)
    validate(recipe)
    return recipe


def with_optimizer(**optimizer: Any) -> OptimizerConfig:
    """Returns an optimizer of a rate that learns fast."""
    return OptimizerConfig(**{"lr": 1e-3, **optimizer})


def on_ranks(
    findings: Findings, job: Callable[..., T], *arguments: object, world_size: int = 1, device: str | None = None
) -> T:
    """Calls `job(*arguments)` on every rank of a process group on the check's device, or another, and returns rank 0's
    result. Where the time of the check is over each rank writes its stacks first."""
    return run_ranks(
        with_stacks,
        findings.left_s - STACKS_BEFORE_S - 0.5,
        job,
        arguments,
        world_size=world_size,
        device=device or findings.device,
    )


def with_stacks(seconds: float, job: Callable[..., T], arguments: Sequence[object]) -> T:
    """Runs a job, and writes the stacks of this rank's threads if that takes longer than some seconds."""
    with stacks_after(seconds):
        return job(*arguments)


@contextmanager
def stacks_after(seconds: float) -> Iterator[None]:
    """Writes the stacks of all threads to stderr if the block takes longer than some seconds."""
    faulthandler.dump_traceback_later(max(0.5, seconds))
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class Trained:
    """What a training of a few steps gave, the same on every rank."""

    curve: Curve
    skipped_steps: int


def make_trainer(recipe: Recipe, device: str) -> Trainer:
    """Builds the recipe's trainer on this rank; every rank calls it. `device` is "cuda" or "cpu"."""
    mesh = build_mesh(recipe.parallel, device)
    model = model_class(recipe.model.architecture)
    return Trainer(
        recipe, mesh=mesh, device=own_device(device), model_class=model, gpu_bytes=gpu_bytes(own_device(device))
    )


def train(recipes: dict[str, Recipe], device: str, steps: int = STEPS) -> dict[str, Trained]:
    """Trains each recipe for some steps on random tokens. It says which recipe is next, so that the log of a hang ends
    with it."""
    found = {}
    for name, recipe in recipes.items():
        if dist.get_rank() == 0:
            print(f"training {name}", file=sys.stderr, flush=True)
        trainer = make_trainer(recipe, device)
        results = [trainer.train_step(random_batch(recipe, dist.get_rank(), seed)) for seed in range(steps)]
        found[name] = Trained([(result.loss, result.grad_norm) for result in results], trainer.skipped_steps)
    return found


def compare(findings: Findings, name: str, mine: Trained, other: Trained, *, loss: float, norm: float) -> None:
    """Compares two trainings, step by step, relative to the other's."""
    pairs = list(zip(mine.curve, other.curve, strict=True))
    findings.at_most(f"{name}: loss", max(abs(a[0] / b[0] - 1) for a, b in pairs), loss)
    findings.at_most(f"{name}: norm", max(abs(a[1] / b[1] - 1) for a, b in pairs), norm)

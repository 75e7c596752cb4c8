"""Training runs that `parallel3d-plan calibrate` times. They use the real trainer.

Tiny models with two depths and two numbers of microbatches determine the overheads outside kernels,
because the time of a step is linear in both. A larger model determines the times per parameter and
per element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Recipe,
    TrainConfig,
)
from parallel3d.data.loader import Batch
from parallel3d.mesh import build_mesh, dp_rank
from parallel3d.models.llama import Llama
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.reporting.metrics import gpu_bytes
from parallel3d.tools.clock import DeviceClock
from parallel3d.training.trainer import Trainer

TINY = ModelConfig(layers=2, hidden=32, heads=8, kv_heads=8, ffn_hidden=64, vocab=64)
Size = tuple[int, int]  # (sequence length, microbatch size)
TINY_SIZE = (8, 1)
LAYERS = (1, 4)
MICROBATCHES = (2, 8)


@dataclass(frozen=True, kw_only=True)
class LargerRuns:
    """Runs of the larger model on a type of device. Their sizes are chosen so that a fit can tell
    the time per element from the time per weight.

    A GPU works asynchronously (`synchronous` is False), so a step takes as long as the slower of
    its kernels and their dispatch. These runs are so large that it is the kernels."""

    model: ModelConfig
    sizes: tuple[Size, ...]
    precision: Precision
    synchronous: bool

    @property
    def parameters(self) -> float:
        """Number of parameters of the larger model at the larger depth."""
        return total_parameters(from_config(replace(self.model, layers=LAYERS[-1])))

    @classmethod
    def on(cls, device_type: str) -> LargerRuns:
        return ON_CPU if device_type == "cpu" else ON_GPU


ON_CPU = LargerRuns(
    model=ModelConfig(layers=1, hidden=256, heads=8, kv_heads=8, ffn_hidden=704, vocab=2048),
    sizes=((32, 1), (128, 1), (128, 4)),
    precision="fp32",
    synchronous=True,
)
ON_GPU = LargerRuns(
    model=ModelConfig(layers=1, hidden=2048, heads=16, kv_heads=16, ffn_hidden=4096, vocab=4096),
    sizes=((2048, 1), (4096, 1), (4096, 4)),
    precision="bf16",
    synchronous=False,
)


class Probe(NamedTuple):
    """A training run to time, and the key of its result."""

    axis: str
    model: ModelConfig
    layers: int
    microbatches: int
    size: Size = TINY_SIZE

    def recipe(self, parallel: ParallelConfig, precision: Precision = "fp32") -> Recipe:
        seq, microbatch_size = self.size
        return Recipe(
            model=replace(self.model, layers=self.layers),
            parallel=replace(parallel, microbatch_size=microbatch_size),
            train=TrainConfig(
                steps=1_000_000,
                global_batch_size=self.microbatches * parallel.dp * microbatch_size,
                seq_len=seq,
                precision=precision,
            ),
            optimizer=OptimizerConfig(lr=1e-4),
        )


def probes(world_size: int, larger: LargerRuns = ON_CPU) -> dict[Probe, Recipe]:
    """Returns the runs to time with `world_size` ranks, each along one axis."""
    deep = LAYERS[-1:]
    if world_size == 1:
        recomputed = [
            (kind, ParallelConfig(recompute=kind), TINY, deep, (TINY_SIZE,))
            for kind in ("selective", "full")
        ]
        plain = ParallelConfig()
        runs = [
            ("alone", plain, TINY, LAYERS, (TINY_SIZE,)),
            ("alone", plain, larger.model, LAYERS, larger.sizes),
            *recomputed,
        ]
    else:
        axes = {
            "NO_SHARD": ParallelConfig(dp_replicate=world_size, sharding="NO_SHARD"),
            "SHARD_OPTIMIZER": ParallelConfig(dp_shard=world_size, sharding="SHARD_OPTIMIZER"),
            "FULL_SHARD": ParallelConfig(dp_shard=world_size, sharding="FULL_SHARD"),
            "HYBRID_SHARD": ParallelConfig(dp_replicate=world_size, sharding="HYBRID_SHARD"),
        }
        if TINY.heads % world_size == 0:
            axes["tp"] = ParallelConfig(tp=world_size)
            axes["tp_sequence"] = ParallelConfig(tp=world_size, sequence_parallel=True)
        runs = []
        for axis, parallel in axes.items():
            runs.append((axis, parallel, TINY, LAYERS, (TINY_SIZE,)))
            runs.append((axis, parallel, larger.model, deep, larger.sizes[1:2]))
    found = {}
    for axis, parallel, model, layers, sizes in runs:
        for choice in product(layers, MICROBATCHES, sizes):
            probe = Probe(axis, model, *choice)
            found[probe] = probe.recipe(parallel, larger.precision)
    if world_size > 1:
        for microbatches in MICROBATCHES:
            probe = Probe("pp", TINY, world_size, microbatches * world_size)
            found[probe] = probe.recipe(ParallelConfig(pp=world_size), larger.precision)
    return found


def time_probes(recipes: Sequence[Recipe], device: torch.device, *, rounds: int) -> list[float]:
    """Returns the shortest step time of each recipe in seconds. Every rank must call it.

    Each round runs all recipes, so a short disturbance of the machine affects one round of a few
    recipes only."""
    # Recipes with the same axis sizes share a mesh. Each gloo group has a thread that wakes 100
    # times per second, so the groups of forty meshes would slow down small steps.
    meshes: dict[str, DeviceMesh] = {}
    works = []
    for recipe in recipes:
        sizes = str(recipe.parallel.axes)
        if sizes not in meshes:
            meshes[sizes] = build_mesh(recipe.parallel, device.type)
        works.append(_step(recipe, device, meshes[sizes]))
    clock = DeviceClock(device)
    least = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            dist.barrier()
            least[i] = min(least[i], clock.seconds(work))
    return least


def _step(recipe: Recipe, device: torch.device, mesh: DeviceMesh) -> Callable[[], object]:
    """Returns a function that trains one step. Ranks with the same data-parallel rank use the same
    tokens.
    """
    trainer = Trainer(
        recipe, mesh=mesh, device=device, model_class=Llama, gpu_bytes=gpu_bytes(device)
    )
    shape = (recipe.microbatches, recipe.parallel.microbatch_size, recipe.train.seq_len + 1)
    generator = torch.Generator().manual_seed(dp_rank(recipe.parallel, dist.get_rank()))
    tokens = torch.randint(recipe.model.vocab, shape, generator=generator)
    batch = Batch(
        inputs=tokens[..., :-1].contiguous(),
        labels=tokens[..., 1:].contiguous(),
        samples=torch.arange(tokens[..., 0].numel()).view(shape[:2]),
    )
    return lambda: trainer.train_step(batch)

"""The runs of `parallel3d-plan calibrate` that train: tiny models of two depths and two numbers of
microbatches tell what the program adds to its kernels (a step's time is linear in both), larger
ones what each parameter and element does.

Which runs there are is decided without torch; `time_probes` trains them with the real trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Recipe,
    TrainConfig,
)
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config

if TYPE_CHECKING:
    import torch
    from torch.distributed import DeviceMesh

TINY = ModelConfig(layers=2, hidden=32, heads=8, kv_heads=8, ffn_hidden=64, vocab=64)
TINY_SEQ = 8
LARGER = ModelConfig(layers=1, hidden=256, heads=8, kv_heads=8, ffn_hidden=704, vocab=2048)
LARGER_SEQ = 128
# sequence and microbatch: what elements take, and weights
LARGER_SIZES = ((32, 1), (LARGER_SEQ, 1), (LARGER_SEQ, 4))
TINY_LAYERS = (2, 6)
TINY_MICROBATCHES = (2, 10)
LARGER_LAYERS = (1, 3)
LARGER_MICROBATCHES = (2, 6)


@dataclass(frozen=True, kw_only=True)
class LargerRuns:
    """The runs of the larger model on a kind of device, as (sequence, microbatch) of each size. On
    a GPU, which is not `synchronous`, a step takes the longer of kernels and dispatch: they are so
    large that it is the kernels."""

    model: ModelConfig
    sizes: tuple[tuple[int, int], ...]
    precision: Precision
    synchronous: bool

    @property
    def parameters(self) -> float:
        """The parameters of the deep larger model."""
        return total_parameters(from_config(replace(self.model, layers=LARGER_LAYERS[-1])))

    @classmethod
    def on(cls, device_type: str) -> LargerRuns:
        return ON_CPU if device_type == "cpu" else ON_GPU


ON_CPU = LargerRuns(model=LARGER, sizes=LARGER_SIZES, precision="fp32", synchronous=True)
ON_GPU = LargerRuns(
    model=ModelConfig(layers=1, hidden=2048, heads=16, kv_heads=16, ffn_hidden=4096, vocab=4096),
    sizes=((2048, 1), (4096, 1), (4096, 4)),
    precision="bf16",
    synchronous=False,
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run to time; `name` is what its time is looked up by."""

    name: str
    recipe: Recipe


def probe_name(
    axis: str, model: ModelConfig, layers: int, microbatches: int, seq: int, microbatch_size: int
) -> str:
    size = "tiny" if model is TINY else "larger"
    return f"{axis} {size} {layers} layers {microbatches} x {microbatch_size} x {seq}"


def probe(
    axis: str,
    parallel: ParallelConfig,
    model: ModelConfig,
    layers: int,
    microbatches: int,
    *,
    seq: int = TINY_SEQ,
    precision: Precision = "fp32",
) -> Probe:
    batch = microbatches * parallel.dp * parallel.microbatch_size
    recipe = Recipe(
        model=replace(model, layers=layers),
        parallel=parallel,
        train=TrainConfig(
            steps=1_000_000, global_batch_size=batch, seq_len=seq, precision=precision
        ),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=0),
    )
    name = probe_name(axis, model, layers, microbatches, seq, parallel.microbatch_size)
    return Probe(name=name, recipe=recipe)


def probes(world_size: int, larger: LargerRuns = ON_CPU) -> list[Probe]:
    """Returns the runs to time with so many ranks, each along one axis."""
    run = partial(probe, precision=larger.precision)

    def tiny(axis: str, parallel: ParallelConfig) -> list[Probe]:
        return [
            run(axis, parallel, TINY, layers, m)
            for layers in TINY_LAYERS
            for m in TINY_MICROBATCHES
        ]

    if world_size == 1:
        found = tiny("alone", ParallelConfig())
        for (seq, size), layers, m in product(larger.sizes, LARGER_LAYERS, LARGER_MICROBATCHES):
            found.append(
                run("alone", ParallelConfig(microbatch_size=size), larger.model, layers, m, seq=seq)
            )
        for kind in ("selective", "full"):
            found += [
                run(kind, ParallelConfig(recompute=kind), TINY, TINY_LAYERS[-1], m)
                for m in TINY_MICROBATCHES
            ]
        return found
    axes = {
        "NO_SHARD": ParallelConfig(dp_replicate=world_size, sharding="NO_SHARD"),
        "SHARD_OPTIMIZER": ParallelConfig(dp_shard=world_size, sharding="SHARD_OPTIMIZER"),
        "FULL_SHARD": ParallelConfig(dp_shard=world_size, sharding="FULL_SHARD"),
        "HYBRID_SHARD": ParallelConfig(dp_replicate=world_size, sharding="HYBRID_SHARD"),
    }
    if TINY.heads % world_size == 0:
        axes["tp"] = ParallelConfig(tp=world_size)
        axes["tp_sequence"] = ParallelConfig(tp=world_size, sequence_parallel=True)
    found = []
    for axis, parallel in axes.items():
        found += tiny(axis, parallel)
        seq, _ = larger.sizes[1]
        found += [
            run(axis, parallel, larger.model, LARGER_LAYERS[-1], m, seq=seq)
            for m in LARGER_MICROBATCHES
        ]
    pipeline = ParallelConfig(pp=world_size)
    return [
        *found,
        *(run("pp", pipeline, TINY, world_size, m * world_size) for m in TINY_MICROBATCHES),
    ]


def time_probes(recipes: Sequence[Recipe], device: torch.device, *, rounds: int) -> list[float]:
    """Returns the seconds of a step of each recipe with the trainer, the least of several rounds. A
    round goes through all recipes: what else a machine does for a second or two then spoils one
    round of a few recipes, and not all rounds of one. Every rank of the world calls it."""
    import torch.distributed as dist

    from parallel3d.mesh import build_mesh
    from parallel3d.tools.calibrate.kernels import timed_s

    # One mesh serves all recipes of the same sizes. Each of gloo's groups has a thread that wakes
    # 100 times a second: the groups of forty meshes made a small step with four ranks on two cores
    # take 40% longer.
    layouts = {tuple(recipe.parallel.axes.values()): recipe.parallel for recipe in recipes}
    meshes = {sizes: build_mesh(parallel, device.type) for sizes, parallel in layouts.items()}
    works = [
        _step(recipe, device, meshes[tuple(recipe.parallel.axes.values())]) for recipe in recipes
    ]
    for work in works:
        for _ in range(2):
            work()
    least = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            dist.barrier()
            least[i] = min(least[i], timed_s(work, device, 1))
    return least


def _step(recipe: Recipe, device: torch.device, mesh: DeviceMesh) -> Callable[[], object]:
    """Returns a call of one training step, on tokens that all ranks of one data rank draw alike."""
    import torch
    import torch.distributed as dist

    from parallel3d.data.loader import Batch
    from parallel3d.models import model_class
    from parallel3d.reporting.metrics import gpu_bytes
    from parallel3d.training.trainer import Trainer

    build = model_class(recipe.model.architecture)
    trainer = Trainer(
        recipe, mesh=mesh, device=device, model_class=build, gpu_bytes=gpu_bytes(device)
    )
    place = recipe.parallel.coordinates(dist.get_rank())
    shape = (recipe.microbatches, recipe.parallel.microbatch_size, recipe.train.seq_len + 1)
    generator = torch.Generator().manual_seed(
        place.dp_replicate * recipe.parallel.dp_shard + place.dp_shard
    )
    tokens = torch.randint(recipe.model.vocab, shape, generator=generator)
    batch = Batch(
        inputs=tokens[..., :-1].contiguous(),
        labels=tokens[..., 1:].contiguous(),
        samples=torch.arange(tokens[..., 0].numel()).view(shape[:2]),
    )
    return lambda: trainer.train_step(batch)

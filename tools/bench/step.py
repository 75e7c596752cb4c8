"""`bench step`: times a training step in each layout against PyTorch's native stack.

Both run in the same processes, start from the same weights and see the same tokens. Losses must
agree before timing. At size `overhead` there is almost nothing to compute, which shows the cost of
parallelism. At `compute`, matmuls dominate, as in real training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Recipe,
    TrainConfig,
)
from parallel3d.data.loader import Batch
from parallel3d.layers.parameter import initial_weights
from parallel3d.mesh import build_mesh
from parallel3d.models.llama import Llama
from parallel3d.reporting.metrics import gpu_bytes
from parallel3d.shared_memory import segment
from parallel3d.tools.bench.harness import (
    AGREEMENT,
    TimedCase,
    check_agreement,
    run_cases,
    time_in_turn,
)
from parallel3d.tools.bench.plain_torch.llama import PeerSettings, PlainStack
from parallel3d.tools.bench.plain_torch.stack import TorchStack
from parallel3d.tools.bench.report import Options, ResultRow, Round
from parallel3d.tools.local_ranks import own_device
from parallel3d.training.trainer import Trainer

TrainStep = Callable[[Batch], float]
BF16_AGREEMENT = 2e-2


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Model, sequence length and device of a measurement, and its number of rounds and steps.

    `is_compiled` compiles parallel3d's model and, on CPU, the peer's. On a GPU the peer is always
    compiled. `wall_bar` is the largest ratio of wall time, ours / peer.
    """

    name: str
    model: ModelConfig
    seq_len: int
    rounds: int
    steps: int  # Steps per round.
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    is_compiled: bool = False
    wall_bar: float | None = None

    def peer_settings(self) -> PeerSettings:
        on_gpu = self.device == "cuda"
        return PeerSettings(
            device=own_device(self.device),
            is_bf16=self.precision == "bf16",
            is_compiled=on_gpu or self.is_compiled,
        )


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """A parallel layout to benchmark."""

    name: str
    parallel: ParallelConfig
    # Largest ratio of CPU time, ours / peer, keyed by the name of the size.
    cpu_bars: dict[str, float] = field(default_factory=dict)


OVERHEAD = StepSize(
    name="overhead",
    model=ModelConfig(
        layers=8,
        hidden=64,
        heads=4,
        kv_heads=2,
        ffn_hidden=176,
        vocab=512,
    ),
    seq_len=64,
    rounds=5,
    steps=2,
)
COMPUTE = StepSize(
    name="compute",
    model=ModelConfig(
        layers=8,
        hidden=512,
        heads=8,
        kv_heads=4,
        ffn_hidden=1408,
        vocab=8192,
    ),
    seq_len=256,
    rounds=3,
    steps=1,
)
SIZES = (OVERHEAD, COMPUTE)
_GPU_COMPUTE = StepSize(  # four blocks of Llama 3 8B with a quarter of its vocabulary
    name="compute",
    model=ModelConfig(
        layers=4,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn_hidden=14336,
        vocab=32_064,
    ),
    seq_len=4096,
    rounds=3,
    steps=2,
    device="cuda",
    precision="bf16",
)
GPU_SIZES = (
    replace(OVERHEAD, device="cuda"),
    _GPU_COMPUTE,
    replace(_GPU_COMPUTE, name="compute, compiled", is_compiled=True),
)
LAYOUTS = (
    StepLayout(name="single", parallel=ParallelConfig()),
    StepLayout(
        name="pp 2", parallel=ParallelConfig(pp=2), cpu_bars={"overhead": 0.9, "compute": 1.0}
    ),
    StepLayout(
        name="tp 2", parallel=ParallelConfig(tp=2), cpu_bars={"overhead": 0.4, "compute": 0.75}
    ),
    StepLayout(
        name="tp 2 sequence parallel", parallel=ParallelConfig(tp=2, sequence_parallel=True)
    ),
    # The peer keeps gathered parameters for a step.
    StepLayout(name="dp_shard 2", parallel=ParallelConfig(dp_shard=2, gather="step")),
    StepLayout(
        name="tp 2 x pp 2 x dp_shard 2",
        parallel=ParallelConfig(tp=2, pp=2, dp_shard=2),
        cpu_bars={"overhead": 0.35, "compute": 0.8},
    ),
)


def bench_step(options: Options) -> list[ResultRow]:
    """Times the selected cases and returns their rows."""
    if options.device == "cuda":
        return run_cases(timed_cases(measure, GPU_SIZES, LAYOUTS), options)
    cases = timed_cases(measure, SIZES, LAYOUTS)
    split = [replace(each, cpu_bars={}) for each in LAYOUTS if each.name in ("pp 2", "tp 2")]
    cases |= timed_cases(measure_on_gloo, (OVERHEAD,), split, "gloo only, ")
    return run_cases(cases, options)


def timed_cases(
    measure: Callable[..., list[Round]],
    sizes: Sequence[StepSize],
    layouts: Sequence[StepLayout],
    prefix: str = "",
) -> dict[str, TimedCase]:
    """Returns a case for each size and layout.

    Every rank of a case calls `measure(size, parallel, rounds, steps)`. If the first layout has one
    process, the others are also compared with its peer.
    """
    cases = {}
    for size in sizes:
        first = (
            f"{prefix}{size.name}: {layouts[0].name}" if layouts[0].parallel.world_size == 1 else ""
        )
        for layout in layouts:
            cases[f"{prefix}{size.name}: {layout.name}"] = TimedCase(
                measure=measure,
                arguments=(size, layout.parallel),
                world_size=layout.parallel.world_size,
                rounds=size.rounds,
                steps=size.steps,
                cpu_bar=layout.cpu_bars.get(size.name) if size.device == "cpu" else None,
                wall_bar=size.wall_bar,
                one_process=first,
            )
    return cases


def recipe(size: StepSize, parallel: ParallelConfig) -> Recipe:
    """Returns a recipe with 8 sequences per step, 1 per microbatch, and a constant lr."""
    return Recipe(
        model=size.model,
        parallel=replace(parallel, microbatch_size=1),
        train=TrainConfig(
            steps=1_000_000,
            global_batch_size=8,
            seq_len=size.seq_len,
            grad_clip=1.0,
            precision=size.precision,
            compile=size.is_compiled,
            device=size.device,
        ),
        optimizer=OptimizerConfig(
            lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), warmup_steps=0, min_lr_ratio=1.0
        ),
    )


def measure(size: StepSize, parallel: ParallelConfig, rounds: int, steps: int) -> list[Round]:
    """Checks the trainer against its peer, then times both alternately. Runs on every rank.

    The peer is PyTorch's native stack, or the plain loop for one process.
    """
    plan = recipe(size, parallel)
    settings = size.peer_settings()
    device = settings.device
    mesh = build_mesh(plan.parallel, size.device)
    trainer = Trainer(
        plan, mesh=mesh, device=device, model_class=Llama, gpu_bytes=gpu_bytes(device)
    )
    weights = initial_weights(Llama(plan.model, device="meta"), plan.train.seed)
    if parallel.world_size == 1:
        stack: PlainStack | TorchStack = PlainStack(plan, weights, settings)
    else:
        stack = TorchStack(plan, build_mesh(plan.parallel, size.device), weights, settings)
    # Two steps must agree, because only the second depends on gradients. They also serve as warmup.
    return time_train_steps(
        plan,
        lambda batch: trainer.train_step(batch).loss,
        lambda batch: stack.train_step(batch)[0],
        agreement_steps=2,
        rounds=rounds,
        steps=steps,
    )


def measure_on_gloo(
    size: StepSize, parallel: ParallelConfig, rounds: int, steps: int
) -> list[Round]:
    """Measures without shared memory, as between hosts: all messages go through gloo."""
    folder, segment.MEMORY_FOLDER = segment.MEMORY_FOLDER, Path("/dev/null")
    try:
        return measure(size, parallel, rounds, steps)
    finally:
        segment.MEMORY_FOLDER = folder


def time_train_steps(
    recipe: Recipe,
    ours: TrainStep,
    peer: TrainStep,
    *,
    agreement_steps: int,
    rounds: int,
    steps: int,
) -> list[Round]:
    """Checks that both contestants agree, then times them alternately on further batches.

    Both map a local batch to the global loss. Raises RankError if the losses differ.
    """
    batches = [
        random_batch(recipe, dist.get_rank(), seed) for seed in range(agreement_steps + steps)
    ]
    first = batches[:agreement_steps]
    further = batches[agreement_steps:]
    losses = (
        (f"loss of step {step}", ours(batch), peer(batch)) for step, batch in enumerate(first)
    )
    check_agreement(losses, BF16_AGREEMENT if recipe.train.precision == "bf16" else AGREEMENT)
    device = own_device(recipe.train.device)
    return time_in_turn(
        lambda at: ours(further[at]),
        lambda at: peer(further[at]),
        rounds=rounds,
        steps=steps,
        device=device,
    )


def random_batch(recipe: Recipe, rank: int, seed: int) -> Batch:
    """Returns the share of `rank` in a random global batch."""
    place = recipe.parallel.coordinates(rank)
    share = place.dp_replicate * recipe.parallel.dp_shard + place.dp_shard
    shape = (
        recipe.parallel.dp,
        recipe.microbatches,
        recipe.parallel.microbatch_size,
        recipe.train.seq_len + 1,
    )
    tokens = torch.randint(
        recipe.model.vocab, shape, generator=torch.Generator().manual_seed(seed)
    )[share]
    samples = torch.arange(tokens[..., 0].numel()).view(tokens.shape[:-1])
    return Batch(
        inputs=tokens[..., :-1].contiguous(), labels=tokens[..., 1:].contiguous(), samples=samples
    )

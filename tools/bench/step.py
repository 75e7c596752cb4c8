"""`bench step`: a training step in each layout, ours and torch's own stack in turn in the same processes.

Both start from the same weights and see the same tokens, and their losses must agree before anything is timed: a peer
that trains another model proves nothing. Two sizes: `overhead`, where there is next to nothing to compute, so that the
cost of parallelism itself is seen, and `compute`, where matrix products rule, as in real training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.data.loader import Batch
from parallel3d.errors import RankError
from parallel3d.layers.init import initial_weights
from parallel3d.mesh import build_mesh
from parallel3d.models.llama import Llama
from parallel3d.tools.bench.plain_stack import PlainStack
from parallel3d.tools.bench.ranks import run_ranks
from parallel3d.tools.bench.report import (
    Options,
    ResultRow,
    Round,
    announced,
    chosen,
    rows_against_one_process,
    rows_against_peer,
)
from parallel3d.tools.bench.timing import time_in_turn
from parallel3d.tools.bench.torch_stack import TorchStack
from parallel3d.training.trainer import Trainer

TrainStep = Callable[[Batch], float]

_CPU = torch.device("cpu")
_AGREEMENT = 1e-4  # relative, of the two losses
_AGREEMENT_STEPS = 2  # enough that the second one depends on the first one's gradients; they warm up both as well
_SINGLE = "single"


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """A model, a sequence length, and how long to measure it."""

    name: str
    model: ModelConfig
    seq_len: int
    rounds: int
    steps: int  # in a round


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """A way to cut a size over processes, and the bars that ours promises to keep in it."""

    name: str
    parallel: ParallelConfig
    cpu_bars: dict[str, float]  # by size: processor time, ours / peer


OVERHEAD = StepSize(
    name="overhead",
    model=ModelConfig(layers=8, hidden=64, heads=4, kv_heads=2, ffn_hidden=176, vocab=512),
    seq_len=64,
    rounds=5,
    steps=2,
)
COMPUTE = StepSize(
    name="compute",
    model=ModelConfig(layers=8, hidden=512, heads=8, kv_heads=4, ffn_hidden=1408, vocab=8192),
    seq_len=256,
    rounds=3,
    steps=1,
)
SIZES = (OVERHEAD, COMPUTE)
LAYOUTS = (
    StepLayout(name=_SINGLE, parallel=ParallelConfig(), cpu_bars={}),
    StepLayout(name="pp 2", parallel=ParallelConfig(pp=2), cpu_bars={"overhead": 0.9, "compute": 1.0}),
    StepLayout(name="tp 2", parallel=ParallelConfig(tp=2), cpu_bars={"overhead": 0.4, "compute": 0.75}),
    StepLayout(name="tp 2 sequence parallel", parallel=ParallelConfig(tp=2, sequence_parallel=True), cpu_bars={}),
    StepLayout(name="dp_shard 2", parallel=ParallelConfig(dp_shard=2), cpu_bars={}),
    StepLayout(
        name="tp 2 x pp 2 x dp_shard 2",
        parallel=ParallelConfig(tp=2, pp=2, dp_shard=2),
        cpu_bars={"overhead": 0.35, "compute": 0.8},
    ),
)


def bench_step(options: Options) -> list[ResultRow]:
    """Times every case that `options` names, and returns their rows. Rows against one process need the size's case
    `single` among them."""
    cases = {f"{size.name}: {layout.name}": (size, layout) for size in SIZES for layout in LAYOUTS}
    rows: list[ResultRow] = []
    one_process: dict[str, Sequence[Round]] = {}
    for name in announced(chosen(cases, options)):
        size, layout = cases[name]
        rounds = run_ranks(
            measure,
            recipe(size, layout.parallel),
            options.rounds or size.rounds,
            options.steps or size.steps,
            world_size=layout.parallel.world_size,
        )
        rows += rows_against_peer(name, rounds, layout.cpu_bars.get(size.name))
        if layout.name == _SINGLE:
            one_process[size.name] = rounds
        elif size.name in one_process:
            rows += rows_against_one_process(name, rounds, one_process[size.name])
    return rows


def recipe(size: StepSize, parallel: ParallelConfig) -> Recipe:
    """Returns a recipe with 8 sequences a step in microbatches of 1, float32, and a constant learning rate."""
    return Recipe(
        model=size.model,
        parallel=replace(parallel, microbatch_size=1),
        train=TrainConfig(steps=1_000_000, global_batch_size=8, seq_len=size.seq_len, grad_clip=1.0, device="cpu"),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), warmup_steps=0, min_lr_ratio=1.0),
    )


def measure(recipe: Recipe, rounds: int, steps: int) -> list[Round]:
    """Runs on every rank: checks both contestants against each other, then times them in turn."""
    ours, peer = build_ours(recipe), build_peer(recipe)
    rank = dist.get_rank()
    check_agreement(ours, peer, [random_batch(recipe, rank, seed) for seed in range(_AGREEMENT_STEPS)])
    batches = [random_batch(recipe, rank, _AGREEMENT_STEPS + seed) for seed in range(steps)]
    return time_in_turn(lambda at: ours(batches[at]), lambda at: peer(batches[at]), rounds=rounds, steps=steps)


def build_ours(recipe: Recipe) -> TrainStep:
    """Returns a step of this project's trainer: a function from this rank's batch to the global loss."""
    mesh = build_mesh(recipe.parallel, "cpu")
    trainer = Trainer(recipe, mesh=mesh, device=_CPU, model_class=Llama)
    return lambda batch: trainer.train_step(batch).loss


def build_peer(recipe: Recipe) -> TrainStep:
    """Returns a step of torch's own stack, or of the plain loop where there is one process, from the same weights."""
    weights = initial_weights(Llama(recipe.model, device="meta"), recipe.train.seed)
    if recipe.parallel.world_size == 1:
        stack: PlainStack | TorchStack = PlainStack(recipe, weights)
    else:
        stack = TorchStack(recipe, build_mesh(recipe.parallel, "cpu"), weights)
    return lambda batch: stack.train_step(batch)[0]


def random_batch(recipe: Recipe, rank: int, seed: int) -> Batch:
    """Returns the contiguous share that `rank` has of a global batch of random tokens."""
    place = recipe.parallel.coordinates(rank)
    share = place.dp_replicate * recipe.parallel.dp_shard + place.dp_shard
    shape = (recipe.parallel.dp, recipe.microbatches, recipe.parallel.microbatch_size, recipe.train.seq_len + 1)
    tokens = torch.randint(recipe.model.vocab, shape, generator=torch.Generator().manual_seed(seed))[share]
    samples = torch.arange(tokens[..., 0].numel()).view(tokens.shape[:-1])
    return Batch(inputs=tokens[..., :-1].contiguous(), labels=tokens[..., 1:].contiguous(), samples=samples)


def check_agreement(ours: TrainStep, peer: TrainStep, batches: Sequence[Batch]) -> None:
    """Takes one step of each contestant on each batch. Raises RankError where the losses differ: the timings would
    compare two different runs."""
    for step, batch in enumerate(batches):
        our_loss, peer_loss = ours(batch), peer(batch)
        if not abs(our_loss - peer_loss) <= _AGREEMENT * abs(peer_loss):  # not: NaN differs from all
            raise RankError(f"step {step}: our loss {our_loss:.6f}, the peer's {peer_loss:.6f}: not the same training")

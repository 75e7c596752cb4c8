"""`bench data`: the data dimension alone, each strategy and torch's own way to it in turn, on the same plain model.

    NO_SHARD                      DistributedDataParallel, with its gradients as views into its buckets
    SHARD_OPTIMIZER               the same, with ZeroRedundancyOptimizer
    SHARD_GRAD_OP, FULL_SHARD     fully_shard on each block, which is what carries them: what asking for it costs

Losses must agree before anything is timed. Two sizes: `overhead`, whose model has next to nothing to compute, and
`compute`, where matrix products rule. Two data ranks, four microbatches of one sequence on each, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.data.loader import Batch
from parallel3d.mesh import build_mesh
from parallel3d.sharding.apply import named_parts, shard
from parallel3d.sharding.optimizer_parts import OptimizerPart, ShardedData
from parallel3d.sharding.settings import ShardingOptions
from parallel3d.tools.bench.plain_llama import PlainLlama
from parallel3d.tools.bench.ranks import run_ranks
from parallel3d.tools.bench.report import Options, ResultRow, Round, announced, chosen, rows_against_peer
from parallel3d.tools.bench.step import SIZES, StepSize, TrainStep, check_agreement, random_batch, recipe
from parallel3d.tools.bench.timing import time_in_turn

STRATEGIES: tuple[ShardingName, ...] = ("NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD")
BARS: dict[ShardingName, float] = {"NO_SHARD": 1.0, "SHARD_OPTIMIZER": 1.0}  # the others are torch's own work
_RANKS = 2
_AGREEMENT_STEPS = 3


def bench_data(options: Options) -> list[ResultRow]:
    """Times every case that `options` names, and returns two rows of each."""
    cases = {f"{size.name}: {strategy}": (size, strategy) for size in SIZES for strategy in STRATEGIES}
    rows: list[ResultRow] = []
    for name in announced(chosen(cases, options)):
        size, strategy = cases[name]
        rounds, steps = options.rounds or size.rounds, options.steps or size.steps
        measured = run_ranks(measure, size, strategy, rounds, steps, world_size=_RANKS)
        rows += rows_against_peer(name, measured, BARS.get(strategy))
    return rows


def measure(size: StepSize, strategy: ShardingName, rounds: int, steps: int) -> list[Round]:
    """Runs on every rank: checks both contestants against each other, then times them in turn."""
    parallel = ParallelConfig(dp_shard=_RANKS)
    mesh, rank = build_mesh(parallel, "cpu"), dist.get_rank()
    ours, peer = build_ours(size.model, mesh, strategy), build_peer(size.model, mesh, strategy)
    plan = recipe(size, parallel)
    check_agreement(ours, peer, [random_batch(plan, rank, seed) for seed in range(_AGREEMENT_STEPS)])
    batches = [random_batch(plan, rank, _AGREEMENT_STEPS + seed) for seed in range(steps)]
    return time_in_turn(lambda at: ours(batches[at]), lambda at: peer(batches[at]), rounds=rounds, steps=steps)


def build_ours(model: ModelConfig, mesh: DeviceMesh, strategy: ShardingName) -> TrainStep:
    """Returns the step of the plain model under `shard`: a function from this rank's batch to the global loss."""
    module = plain_model(model)
    options = ShardingOptions(microbatches=2)  # more than one: gathered parameters are kept
    data = shard(module, mesh, strategy, options=options)
    parts = named_parts(module, data)
    optimizer = _adamw(part.local for part in parts.values())

    def train_step(batch: Batch) -> float:
        total = torch.zeros(())
        for at, (inputs, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
            data.before_backward(at == len(batch.inputs) - 1)
            total += _backward(module, inputs, labels, len(batch.inputs))
        finish_step(data, parts, optimizer)
        return _mean(total)

    return train_step


def finish_step(data: ShardedData, parts: Mapping[str, OptimizerPart], optimizer: torch.optim.Optimizer) -> None:
    """Reduces the gradients, steps the optimizer and publishes the parameters, after a step's last backward."""
    data.finish_gradients()
    for part in parts.values():
        part.sync_views()
    optimizer.step()
    data.publish()
    data.clear_gradients()


def build_peer(model: ModelConfig, mesh: DeviceMesh, strategy: ShardingName) -> TrainStep:
    """Returns the same step by torch's own means."""
    module = plain_model(model)
    if strategy in ("NO_SHARD", "SHARD_OPTIMIZER"):
        return _replicated_peer(module, split=strategy == "SHARD_OPTIMIZER")
    for block in module.layers.values():
        fully_shard(block, mesh=mesh["dp_shard"], reshard_after_forward=False)
    sharded = fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=False)
    optimizer = _adamw(module.parameters())

    def train_step(batch: Batch) -> float:
        total = torch.zeros(())
        for at, (inputs, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
            last = at == len(batch.inputs) - 1
            if at == 0 or last:
                sharded.set_requires_gradient_sync(last)
                sharded.set_is_last_backward(last)
                sharded.set_reshard_after_backward(last)
            total += _backward(module, inputs, labels, len(batch.inputs))
        optimizer.step()
        optimizer.zero_grad()
        return _mean(total)

    return train_step


def plain_model(config: ModelConfig) -> PlainLlama:
    """Returns the model with the same weights on every rank."""
    torch.manual_seed(0)
    return PlainLlama(config)


def _replicated_peer(module: nn.Module, *, split: bool) -> TrainStep:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if split:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    else:
        optimizer = _adamw(module.parameters())

    def train_step(batch: Batch) -> float:
        total = torch.zeros(())
        for at, (inputs, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
            with nullcontext() if at == len(batch.inputs) - 1 else model.no_sync():
                total += _backward(model, inputs, labels, len(batch.inputs))
        optimizer.step()
        optimizer.zero_grad()
        return _mean(total)

    return train_step


def _backward(model: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, microbatches: int) -> Tensor:
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / microbatches
    loss.backward()
    return loss.detach()


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters), lr=1e-3, fused=True)


def _mean(loss: Tensor) -> float:
    """Returns the mean of the loss over the ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()

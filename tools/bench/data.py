"""`bench data`: sharding strategies on a plain model, each against its counterpart in torch.

    NO_SHARD                      DistributedDataParallel, with gradients as views into its buckets
    SHARD_OPTIMIZER               the same with ZeroRedundancyOptimizer
    SHARD_GRAD_OP, FULL_SHARD     fully_shard on each block, which `shard` also uses

Sizes are those of `bench step`. Each of two data-parallel ranks has four microbatches of one
sequence. The optimizer is AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.data.loader import Batch
from parallel3d.mesh import build_mesh
from parallel3d.sharding.apply import shard
from parallel3d.sharding.optimizer_parts import OptimizerPart, ShardedData, local_parameters
from parallel3d.sharding.settings import ShardingOptions
from parallel3d.tools.bench.harness import run_cases
from parallel3d.tools.bench.plain_torch.llama import PlainLlama, token_loss
from parallel3d.tools.bench.plain_torch.stack import apply_fsdp, sync_in_last_backward
from parallel3d.tools.bench.report import Options, ResultRow, Round
from parallel3d.tools.bench.step import (
    SIZES,
    StepLayout,
    StepSize,
    TrainStep,
    recipe,
    time_train_steps,
    timed_cases,
)

STRATEGIES: tuple[ShardingName, ...] = (
    "NO_SHARD",
    "SHARD_OPTIMIZER",
    "SHARD_GRAD_OP",
    "FULL_SHARD",
)
REPLICATED_BARS = {"overhead": 1.0, "compute": 1.0}  # Largest ratio of CPU time, ours / peer.


def bench_data(options: Options) -> list[ResultRow]:
    """Times the selected cases and returns their rows."""
    layouts = [
        StepLayout(
            name=strategy,
            parallel=ParallelConfig(dp_shard=2, sharding=strategy),
            cpu_bars=REPLICATED_BARS if strategy in ("NO_SHARD", "SHARD_OPTIMIZER") else {},
        )
        for strategy in STRATEGIES
    ]
    return run_cases(timed_cases(measure, SIZES, layouts), options)


def measure(size: StepSize, parallel: ParallelConfig, rounds: int, steps: int) -> list[Round]:
    """Checks that `shard` and its peer agree, then times them alternately. Runs on every rank."""
    mesh = build_mesh(parallel, "cpu")
    strategy = parallel.sharding
    assert strategy is not None
    ours = build_ours(size.model, mesh, strategy)
    peer = build_peer(size.model, mesh, strategy)
    return time_train_steps(
        recipe(size, parallel), ours, peer, agreement_steps=3, rounds=rounds, steps=steps
    )


def build_ours(model: ModelConfig, mesh: DeviceMesh, strategy: ShardingName) -> TrainStep:
    """Shards the plain model with `shard`. Returns its training step."""
    module = _plain_model(model)
    data = shard(module, mesh, strategy, options=ShardingOptions(gather="step"))
    parts = parts_of(module, data)
    optimizer = _adamw(part.local for part in parts.values())

    def begin(index: int, is_last: bool) -> None:
        data.before_backward(is_last)

    return partial(_train_step, module, begin, partial(finish_step, data, parts, optimizer))


def parts_of(model: nn.Module, data: ShardedData) -> dict[str, OptimizerPart]:
    """Returns this rank's part of each parameter, keyed by parameter name."""
    return {own.name: own.part for own in local_parameters(model, {}, data, {})}


def finish_step(
    data: ShardedData, parts: Mapping[str, OptimizerPart], optimizer: torch.optim.Optimizer
) -> None:
    """Finishes a step after its last backward pass: reduces gradients, updates parameters, and
    makes the model compute with them."""
    data.finish_gradients()
    for part in parts.values():
        part.sync_views()
    optimizer.step()
    data.publish()
    data.clear_gradients()


def build_peer(model: ModelConfig, mesh: DeviceMesh, strategy: ShardingName) -> TrainStep:
    """Returns the training step of the plain model with torch's counterpart of `strategy`."""
    plain = _plain_model(model)
    module: nn.Module = plain
    if strategy in ("NO_SHARD", "SHARD_OPTIMIZER"):
        module = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    else:
        apply_fsdp(plain, mesh["dp_shard"])
    optimizer: torch.optim.Optimizer
    if strategy == "SHARD_OPTIMIZER":
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.AdamW, lr=1e-3, fused=True
        )
    else:
        optimizer = _adamw(module.parameters())

    def begin(index: int, is_last: bool) -> None:
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = is_last  # the flag that `no_sync` sets
        else:
            sync_in_last_backward(module, index, is_last)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return partial(_train_step, module, begin, finish)


def _plain_model(config: ModelConfig) -> PlainLlama:
    torch.manual_seed(0)
    return PlainLlama(config)


def _train_step(
    model: nn.Module, begin: Callable[[int, bool], None], finish: Callable[[], None], batch: Batch
) -> float:
    """Runs a training step on a local batch. Returns the mean loss over the ranks.

    It calls `begin(index, is_last)` before each microbatch and `finish` after the last one.
    """
    total = torch.zeros(())
    for index, (inputs, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
        begin(index, index == len(batch.inputs) - 1)
        loss = token_loss(model(inputs), labels) / len(batch.inputs)
        loss.backward()
        total += loss.detach()
    finish()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters), lr=1e-3, fused=True)

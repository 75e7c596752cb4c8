"""`shard`: applies a data-parallel strategy to a model."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d.config.rules_layout import replication_error
from parallel3d.config.sharding_strategies import (
    REPLICATED,
    ShardingName,
    default_gather,
    frees_after_forward,
)
from parallel3d.layers.experts import ExpertWeights
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import ONE_RANK, Role, axes_of
from parallel3d.sharding.fully_sharded import FullyShardedData
from parallel3d.sharding.optimizer_parts import ShardedData
from parallel3d.sharding.replicated import ReplicatedData
from parallel3d.sharding.settings import Dtypes, Reduction, ShardingOptions
from parallel3d.sharding.units import Wrap, units_of


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    strategy: ShardingName,
    *,
    wrap: Wrap = None,
    dtypes: Dtypes | None = None,
    average: bool = True,
    experts: DeviceMesh | None = None,
    options: ShardingOptions | None = None,
) -> ShardedData:
    """Shards or replicates a model over the data-parallel axes of a mesh, in place.

    All data-parallel ranks receive the weights of the first one, except on the meta device.
    `parallelize` calls this function. Call it yourself if you write your own training step. The
    result has these methods:

    - `part(module, name)`: this rank's part of a parameter. The optimizer updates `part.local`.
    - `before_backward(last)`: call before each backward pass. `last` is True for the last one of a
      step.
    - `finish_gradients()`: call after the last backward pass. Then call `sync_views()` of each
      part.
    - `publish()`: call after the optimizer step. The model then computes with the new values.
    - `clear_gradients()`: call instead of `zero_grad()`, because gradients may be views of buckets.

    Args:
        model: Module to shard. A model on the meta device is sharded before memory is allocated.
        mesh: Mesh with the axis dp_replicate or dp_shard, or both. A missing one has size 1.
        strategy: NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD or
            _HYBRID_SHARD_ZERO2 (docs/reference/sharding.md).
        wrap: Name patterns of the modules whose parameters are all-gathered, and whose gradients
            are reduced, as one unit. A tuple of patterns is one unit. Default: each part of a
            Sequential, or each module in the outermost ModuleLists and ModuleDicts.
        dtypes: Data types. Default: the dtype of the model's parameters.
        average: If True, gradients are averaged over the data-parallel ranks, otherwise summed.
        experts: Mesh over which the weights of `ParallelExperts` are sharded (`expert_mesh`).
            Default: `mesh`.
        options: Communication options.

    Returns:
        Handle that synchronizes gradients and distributes updated parameters.

    Raises:
        ValueError: The strategy is unknown or does not fit the mesh, the model or the options, or
            the mesh has unknown axes and no data-parallel axis.

    Example:
        >>> data = parallel3d.shard(model, mesh, "SHARD_OPTIMIZER", wrap=["blocks.*"])
        >>> names = [name.rpartition(".") for name, _ in model.named_parameters()]
        >>> parts = [data.part(model.get_submodule(path), name) for path, _, name in names]
        >>> optimizer = torch.optim.AdamW([part.local for part in parts])
        >>> for at, x in enumerate(microbatches):
        ...     data.before_backward(at == len(microbatches) - 1)
        ...     (model(x).square().mean() / len(microbatches)).backward()
        >>> data.finish_gradients()
        >>> for part in parts:
        ...     part.sync_views()
        >>> optimizer.step()
        >>> data.publish()
        >>> data.clear_gradients()
    """
    if strategy not in get_args(ShardingName):
        raise ValueError(
            f"strategy = {strategy!r}: must be one of {', '.join(get_args(ShardingName))}"
        )
    options = options or ShardingOptions()
    dtypes = dtypes or Dtypes.of(model)
    reduction = Reduction.over(mesh, strategy, dtypes, average=average)
    of_experts = reduction
    if experts is not None and experts != mesh:
        of_experts = Reduction.over(experts, strategy, dtypes, average=average)
    every = reduction.every
    if (error := replication_error(strategy, reduction.replicate.size)) is not None:
        raise ValueError(error)
    if options.offload and strategy in REPLICATED:
        raise ValueError(f"offload = True: not supported by {strategy}; use strategy='FULL_SHARD'")
    is_alone = every.size == 1 and not options.offload
    if is_alone and dtypes.compute == dtypes.master:
        model.to(dtypes.master)
        return ShardedData(model)
    for part in model.modules() if every.size > 1 else ():
        over = of_experts if isinstance(part, ExpertWeights) else reduction
        for parameter in part.parameters(recurse=False):
            if not parameter.is_meta and over.every.size > 1:
                values = local_tensor(parameter.detach())
                sent = values.to(mesh.device_type).contiguous()
                dist.broadcast(sent, group=over.every.group, group_src=0)
                values.copy_(sent)
    for name, parameter in model.named_parameters() if reduction.split else ():
        if parameter.ndim == 0 or parameter.numel() == 0:
            raise ValueError(
                f"{name} {list(parameter.shape)}: a scalar or empty parameter cannot be sharded; "
                "give it the shape [1]"
            )
    if strategy in REPLICATED or is_alone:
        return ReplicatedData(model, wrap, reduction, options, of_experts)
    layers = axes_of(mesh).get(Role.SPLIT_LAYERS, ONE_RANK)
    gather = options.gather or default_gather(strategy, layers.size)
    return FullyShardedData(
        model,
        units_of(model, wrap),
        reduction,
        of_experts,
        replace(options, gather=gather),
        frees_forward=frees_after_forward(strategy, gather),
    )

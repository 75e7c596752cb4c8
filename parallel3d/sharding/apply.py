"""`shard`: the one way to say how a model lies over the data ranks."""

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
from parallel3d.layers.gradients import local_tensor
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
    options: ShardingOptions | None = None,
) -> ShardedData:
    """Lays `model`, in place, over the axes dp_replicate and dp_shard of `mesh` (one that is
    missing has size 1). All data ranks get the weights of the first one; a model on the meta device
    is cut before it takes memory.

    `wrap` says which modules are gathered or reduced in one go (`units_of`; None: each block).
    `dtypes` are by default the model's own. Gradients are averaged over the data ranks, or summed
    without `average`.

    Raises ValueError if there is no such strategy, the mesh has no data axis, or the two do not
    suit each other.
    """
    if strategy not in get_args(ShardingName):
        raise ValueError(
            f"strategy = {strategy!r}: must be one of {', '.join(get_args(ShardingName))}"
        )
    options = options or ShardingOptions()
    dtypes = dtypes or Dtypes.of(model)
    reduction = Reduction.over(mesh, strategy, dtypes, average=average)
    every = reduction.every
    if (error := replication_error(strategy, reduction.replicate.size)) is not None:
        raise ValueError(error)
    if options.offload and strategy in REPLICATED:
        raise ValueError(
            f"offload: {strategy} has full parameters on each rank; try strategy='FULL_SHARD'"
        )
    is_alone = every.size == 1 and not options.offload
    if is_alone and dtypes.compute == dtypes.master:
        model.to(dtypes.master)
        return ShardedData(model)
    for parameter in model.parameters() if every.size > 1 else ():
        if not parameter.is_meta:
            values = local_tensor(parameter.detach())
            sent = values.to(mesh.device_type).contiguous()
            dist.broadcast(sent, group=every.group, group_src=0)
            values.copy_(sent)
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if reduction.split and scalars:
        raise ValueError(f"{scalars[0]}: a scalar has no rows to split; give it the shape [1]")
    if strategy in REPLICATED or is_alone:
        return ReplicatedData(model, wrap, reduction, options)
    layers = axes_of(mesh).get(Role.SPLIT_LAYERS, ONE_RANK)
    gather = options.gather or default_gather(strategy, layers.size)
    return FullyShardedData(
        model,
        units_of(model, wrap),
        reduction,
        replace(options, gather=gather),
        frees_forward=frees_after_forward(strategy, gather),
    )

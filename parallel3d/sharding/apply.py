"""`shard`: the one way to say how a model lies over the data ranks."""

from __future__ import annotations

from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d.config.rules.parallel import replication_error
from parallel3d.config.strategy import WHOLE, Cadence, ShardingName
from parallel3d.mesh import Axis
from parallel3d.sharding.bucket import DataAxes
from parallel3d.sharding.dtypes import Dtypes
from parallel3d.sharding.formulas import frees_after_forward
from parallel3d.sharding.fully_sharded import FullyShardedData, SingleRankData
from parallel3d.sharding.parts import OptimizerPart, ShardedData
from parallel3d.sharding.units import Wrap, units_of
from parallel3d.sharding.whole import ReplicatedData

BUCKET_MIB = 25  # as DistributedDataParallel's


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    strategy: ShardingName,
    *,
    wrap: Wrap = None,
    dtypes: Dtypes | None = None,
    average: bool = True,
    gather: Cadence = "step",
    reduce: Cadence = "step",
    microbatches: int = 1,
    prefetch: int | None = None,
    bucket_mib: float = BUCKET_MIB,
    step_in_backward: bool = False,
) -> ShardedData:
    """Lays `model`, in place, over the axes dp_replicate and dp_shard of `mesh` (one that is missing has size 1). It
    must be the same on all data ranks; on the meta device it is cut before it takes memory.

    `wrap`: what is gathered or reduced in one go (`units_of`; default each block). `dtypes`: default the model's own.
    `average`: gradients are the mean over the data ranks, else their sum. `gather`: parameters that are split at rest
    are kept for all `microbatches` of a step, or freed after each (and with ZeRO-3 after each forward, which with one
    microbatch a step they are anyway). `reduce`: gradients are summed in the last backward of a step, or in each, which
    keeps no whole ones. `prefetch`: so many units are gathered ahead; default as torch does. `bucket_mib`: gradients of
    NO_SHARD and SHARD_OPTIMIZER are sent in pieces of whole units of at least so much. `step_in_backward`: no gradient
    outlives what `OptimizerPart.when_complete` has asked to be done with it; there is one backward a step.

    Raises ValueError where there is no such strategy, the mesh has no data axis, or the two do not suit each other.
    """
    if strategy not in get_args(ShardingName):
        raise ValueError(f"strategy = {strategy!r}: must be one of {', '.join(get_args(ShardingName))}")
    axes = _axes(mesh)
    if (error := replication_error(strategy, axes.replicate.size)) is not None:
        raise ValueError(error)
    dtypes = dtypes or Dtypes.of(model)
    if axes.every.size == 1 and dtypes.compute == dtypes.master:
        model.to(dtypes.master)
        return SingleRankData(model)
    units = units_of(model, wrap)
    if strategy in WHOLE or axes.every.size == 1:
        split = strategy == "SHARD_OPTIMIZER"
        return ReplicatedData(
            model,
            units,
            axes,
            mesh,
            split=split,
            dtypes=dtypes,
            average=average,
            bucket_bytes=int(bucket_mib * 2**20),
            transient=step_in_backward,
        )
    return FullyShardedData(
        model,
        units,
        mesh,
        axes,
        frees_forward=frees_after_forward(strategy, gather, microbatches),
        frees_each=gather == "microbatch",
        reduces_each=reduce == "microbatch",
        dtypes=dtypes,
        average=average,
        prefetch=prefetch,
    )


def named_parts(model: nn.Module, data: ShardedData) -> dict[str, OptimizerPart]:
    """What an optimizer steps on this rank, by the names of the model's parameters, a shared one once."""
    parts = {}
    for name, _ in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        parts[name] = data.part(model.get_submodule(owner), attribute)
    return parts


def _axes(mesh: DeviceMesh) -> DataAxes:
    names = mesh.mesh_dim_names or ()
    if not {"dp_replicate", "dp_shard"} & {*names}:
        raise ValueError(
            f"mesh with the axes {list(names)}: one must be called dp_shard or dp_replicate, or no gradient would be "
            "summed; try init_device_mesh(..., mesh_dim_names=('dp_shard',))"
        )
    replicate, shards = (Axis.of(mesh[name] if name in names else None) for name in ("dp_replicate", "dp_shard"))
    if replicate.size == 1 or shards.size == 1:
        return DataAxes(replicate, shards, shards if replicate.size == 1 else replicate)
    ranks = mesh["dp_replicate", "dp_shard"].mesh.flatten().tolist()
    group = dist.new_group(ranks, use_local_synchronization=True, group_desc="data")
    assert isinstance(group, dist.ProcessGroup)
    return DataAxes(replicate, shards, Axis(len(ranks), ranks.index(dist.get_rank()), group))

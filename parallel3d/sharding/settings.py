"""Settings of `shard`: dtypes, communication options and the data-parallel axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.config.sharding_strategies import Cadence, ShardingName
from parallel3d.mesh import DATA_ROLES, ONE_RANK, Axis, Role, axes_of
from parallel3d.torch_private import group_of


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Data types of mixed-precision training.

    If `compute` and `master` differ, NO_SHARD and SHARD_OPTIMIZER keep a copy of the parameters in
    each dtype. Other strategies keep only the master and all-gather from it.

    Args:
        compute: Dtype of parameters and activations in the forward and backward pass.
        master: Dtype of the parameters that the optimizer updates and a checkpoint stores, and of
            gradient accumulation.
        reduce: Dtype in which gradients are sent.

    Example:
        >>> dtypes = parallel3d.Dtypes(compute=torch.bfloat16)  # float32 masters and gradients
        >>> model = parallel3d.parallelize(model, mesh, dtypes=dtypes)
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: nn.Module) -> Dtypes:
        """Returns the dtype of the model's parameters for all three fields.

        Raises ValueError if the parameters differ in dtype.
        """
        found = {parameter.dtype for parameter in model.parameters()} or {torch.float32}
        if len(found) > 1:
            raise ValueError(
                f"model with parameters of {', '.join(sorted(map(str, found)))}: needs explicit "
                "dtypes; pass dtypes=Dtypes(...)"
            )
        (dtype,) = found
        return cls(compute=dtype, master=dtype, reduce=dtype)


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Timing and granularity of communication.

    `gather`, `reduce`, `prefetch` and `offload` apply only to strategies that shard parameters.

    Args:
        gather: "step" keeps all-gathered parameters for all microbatches of a step. "microbatch"
            frees them after each. With "microbatch", FULL_SHARD and HYBRID_SHARD also free a unit's
            parameters after its forward pass. Default: "microbatch" for these two strategies
            without a pipeline, else "step".
        reduce: "step" reduces gradients in the last backward pass of a step. "microbatch" reduces
            them in each, so that full gradients are not kept.
        prefetch: Number of units to all-gather ahead of their use. Default: torch's choice.
        bucket_mib: Size in MiB at which a gradient bucket of NO_SHARD or SHARD_OPTIMIZER is full.
            Default: depends on the device.
        publish_in_forward: If True, parameters updated under SHARD_OPTIMIZER arrive during the next
            forward pass. Call `finish_publish` before you read parameters elsewhere.
        offload: If True, parameters, gradients and optimizer states are on the CPU. A unit's
            parameters are copied to the GPU when they are all-gathered.

    Example:
        >>> options = parallel3d.ShardingOptions(gather="step", reduce="microbatch", prefetch=2)
        >>> model = parallel3d.parallelize(model, mesh, options=options)
    """

    gather: Cadence | None = None
    reduce: Cadence = "step"
    prefetch: int | None = None
    bucket_mib: float | None = None
    publish_in_forward: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Reduction:
    """The data-parallel axes of a mesh, and how gradients are reduced over them.

    `every` joins `replicate` and `shard` in one group. With `split`, each rank reduces only its own
    rows: a reduce-scatter over dp_shard, then an all-reduce over dp_replicate. Otherwise one
    all-reduce gives every rank the full sum. With `average`, the sum is divided by the number of DP
    ranks.
    """

    mesh: DeviceMesh
    replicate: Axis
    shard: Axis
    every: Axis
    dtypes: Dtypes
    split: bool
    average: bool

    @classmethod
    def over(
        cls, mesh: DeviceMesh, strategy: ShardingName, dtypes: Dtypes, *, average: bool
    ) -> Reduction:
        """Returns the reduction for a mesh. A missing axis has size 1.

        All ranks must call it, because it may create a process group. Raises ValueError if both
        axes are missing and another axis has an unknown name.
        """
        axes = axes_of(mesh)
        if axes.keys().isdisjoint(DATA_ROLES) and not axes.keys() <= {*Role}:
            raise ValueError(
                f"mesh with the axes {list(axes)}: one must be called {' or '.join(DATA_ROLES)}, "
                "to reduce gradients over it; try init_device_mesh(..., "
                f"mesh_dim_names=({Role.SHARD_PARAMETERS.value!r},))"
            )
        replicate, shards = (axes.get(role, ONE_RANK) for role in DATA_ROLES)
        every = joined_axis(mesh, DATA_ROLES, "data")
        split = strategy != "NO_SHARD"
        return cls(mesh, replicate, shards, every, dtypes, split and shards.size > 1, average)

    def own(self, values: Tensor) -> Tensor:
        """Returns the part of a full tensor that the optimizer updates on this rank."""
        return own_rows(values, self.shard) if self.split else values


def joined_axis(mesh: DeviceMesh, names: Sequence[str], description: str) -> Axis:
    """Flattens axes of a mesh into one. The last varies fastest.

    All ranks must call it, because it may create a process group.
    """
    axes = axes_of(mesh)
    larger = tuple(name for name in names if axes.get(name, ONE_RANK).size > 1)
    if len(larger) < 2:
        return axes[larger[0]] if larger else ONE_RANK
    ranks = mesh[larger].mesh.flatten().tolist()
    return Axis(len(ranks), ranks.index(dist.get_rank()), group_of(ranks, description))


def own_rows(values: Tensor, shards: Axis) -> Tensor:
    """Returns a view of this rank's rows in the layout of DTensor's Shard(0)."""
    rows = shards.rows(values.shape[0])
    return values[rows.start : rows.stop]

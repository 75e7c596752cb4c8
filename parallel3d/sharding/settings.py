"""What `shard` is told: dtypes, when parameters and gradients travel, and the axes of the data
dimension."""

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
    """`compute` is the dtype of parameters and activations in forward and backward. `master` is
    what the optimizer steps, what a checkpoint holds and what gradients are added up in. `reduce`
    is what gradients are sent in.

    Where compute and master differ, NO_SHARD and SHARD_OPTIMIZER keep a copy of the parameters in
    each; the other strategies keep the master's alone and gather from it.

    Example:
        >>> dtypes = parallel3d.Dtypes(compute=torch.bfloat16)  # float32 masters and gradients
        >>> model = parallel3d.parallelize(model, mesh, dtypes=dtypes)
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: nn.Module) -> Dtypes:
        """Returns the dtype of the model's parameters for all three. Raises ValueError if the
        parameters differ."""
        found = {parameter.dtype for parameter in model.parameters()} or {torch.float32}
        if len(found) > 1:
            raise ValueError(
                f"parameters of {', '.join(sorted(map(str, found)))}: say dtypes=Dtypes(...)"
            )
        (dtype,) = found
        return cls(compute=dtype, master=dtype, reduce=dtype)


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """When parameters and gradients travel, and in what pieces.

    `gather` says whether parameters that are split at rest are kept for all microbatches of a step,
    or freed after each microbatch. With "microbatch", FULL_SHARD and HYBRID_SHARD also free a
    unit's parameters after its forward pass. The default, None, is "microbatch" for these two
    without a pipeline, and "step" otherwise. `reduce` says whether gradients are summed over the
    data-parallel ranks in the last backward pass of a step, or in each, so that no full gradients
    are kept. `prefetch` units are gathered ahead (None: as torch does). NO_SHARD and
    SHARD_OPTIMIZER send gradients in pieces of complete units, of at least `bucket_mib` (None: by
    the device).

    With `offload` parameters, gradients and optimizer states are on the CPU. A unit's parameters
    are copied to the GPU when they are gathered.

    With `publish_in_forward` the parameters that SHARD_OPTIMIZER's ranks have stepped arrive during
    the next forward pass. Call `finish_publish` before you read parameters elsewhere.

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
    """How a model lies over the data ranks, and how gradients are summed over them. The axes of the
    data dimension on `mesh` are `replicate` and `shard`, and `every` is both of them in one group.

    With `split` each rank makes its rows of the sum alone (a reduce-scatter over dp_shard, then an
    all-reduce of the rows over dp_replicate); otherwise every rank makes all of the sum (one
    all-reduce). With `average` it is divided by the number of data ranks."""

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
        """Looks the axes up on a mesh; one that is missing has size 1. All ranks call it: it may
        make a group. Raises ValueError if both are missing and another axis has an unknown name."""
        axes = axes_of(mesh)
        if axes.keys().isdisjoint(DATA_ROLES) and not axes.keys() <= {*Role}:
            raise ValueError(
                f"mesh with the axes {list(axes)}: one must be called {' or '.join(DATA_ROLES)}, "
                "or no gradient would be summed; try init_device_mesh(..., "
                f"mesh_dim_names=({Role.SHARD_PARAMETERS.value!r},))"
            )
        replicate, shards = (axes.get(role, ONE_RANK) for role in DATA_ROLES)
        every = joined_axis(mesh, DATA_ROLES, "data")
        split = strategy != "NO_SHARD"
        return cls(mesh, replicate, shards, every, dtypes, split and shards.size > 1, average)

    def own(self, values: Tensor) -> Tensor:
        """Returns the part of a whole tensor that the optimizer steps on this rank."""
        return own_rows(values, self.shard) if self.split else values


def joined_axis(mesh: DeviceMesh, names: Sequence[str], description: str) -> Axis:
    """Returns some axes of a mesh as one, the last of them innermost. All ranks call it: it may
    make a group."""
    axes = axes_of(mesh)
    larger = tuple(name for name in names if axes.get(name, ONE_RANK).size > 1)
    if len(larger) < 2:
        return axes[larger[0]] if larger else ONE_RANK
    ranks = mesh[larger].mesh.flatten().tolist()
    return Axis(len(ranks), ranks.index(dist.get_rank()), group_of(ranks, description))


def own_rows(values: Tensor, shards: Axis) -> Tensor:
    """Returns a view of this rank's rows, as DTensor's Shard(0) cuts them."""
    rows = shards.rows(values.shape[0])
    return values[rows.start : rows.stop]

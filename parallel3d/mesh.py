"""The mesh: torch's DeviceMesh with every axis of ParallelConfig on it, and an axis as its
collectives need it.

Axes of size 1 are on the mesh too, so that no code asks whether an axis exists. The axis tp is
innermost, so that its ranks are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.config.recipe import ParallelConfig
from parallel3d.shard_sizes import shard_rows
from parallel3d.torch_private import group_of


class Role(StrEnum):
    """What an axis of the mesh is for; the value is its name: `mesh[Role.SPLIT_TENSORS]`. No other
    module knows the names."""

    SPLIT_LAYERS = "pp"
    REPLICATE = "dp_replicate"
    SHARD_PARAMETERS = "dp_shard"
    SPLIT_TENSORS = "tp"


DATA_ROLES = (Role.REPLICATE, Role.SHARD_PARAMETERS)  # their ranks get different data


def dp_rank(parallel: ParallelConfig, rank: int) -> int:
    """Returns the place of a rank among the `parallel.dp` ranks that get different data."""
    coordinates = parallel.coordinates(rank)._asdict()
    place = 0
    for role in DATA_ROLES:
        place = place * parallel.axes[role] + coordinates[role]
    return place


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as its collectives need it. It is looked up once, because a question to
    a DeviceMesh takes longer than a small matrix product."""

    size: int
    rank: int  # the place of this rank on the axis
    group: dist.ProcessGroup | None  # None on an axis of size 1, over which nothing is ever sent

    def rows(self, size: int) -> range:
        """Returns the rows that this rank has of a dim that is split over the axis."""
        return shard_rows(size, self.rank, self.size)

    def part(self, full: Tensor, dim: int | None) -> Tensor:
        """Returns this rank's part of a tensor that is split in `dim` (None: all of it), a view."""
        if dim is None:
            return full
        rows = self.rows(full.shape[dim])
        return full.narrow(dim, rows.start, len(rows))

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copy of a module works over the same ranks

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Axis:
        """Returns the axis of a one-dimensional mesh; None gives an axis of size 1. Raises
        TypeError for all else."""
        if mesh is None:
            return ONE_RANK
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise TypeError(
                f"{mesh!r} is no axis: pass a one-dimensional DeviceMesh, such as mesh['tp'], or "
                "None"
            )
        if mesh.size() == 1:
            return ONE_RANK
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group())


ONE_RANK = Axis(1, 0, None)


def axes_of(mesh: DeviceMesh) -> dict[str, Axis]:
    """Returns every axis of a mesh by its name, outermost first."""
    return {name: Axis.of(mesh[name]) for name in mesh.mesh_dim_names or ()}


def build_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh:
    """Builds the mesh of a layout over all ranks of the default process group.

    Example:
        >>> layout = parallel3d.ParallelConfig(pp=2, dp_shard=2, tp=2)
        >>> mesh = parallel3d.build_mesh(layout, "cuda")  # on 8 ranks
        >>> mesh.mesh_dim_names
        ('pp', 'dp_replicate', 'dp_shard', 'tp')
    """
    return init_device_mesh(
        device_type, tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes)
    )


def data_ranks(mesh: DeviceMesh) -> list[int]:
    """Returns the ranks over which gradients of this rank are summed."""
    return mesh[DATA_ROLES].mesh.flatten().tolist()


def replica_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the part of `mesh` that holds this rank's replica of the model: the same axes, with
    dp_replicate of size 1, so that whatever is given this mesh sends nothing to other replicas.
    Every rank of a replica calls it at once."""
    names = mesh.mesh_dim_names or ()
    replicas = mesh[Role.REPLICATE]
    if replicas.size() == 1:
        return mesh
    groups = [mesh[name].get_group() for name in names]
    axis = names.index(Role.REPLICATE)
    groups[axis] = group_of([dist.get_rank()], "replica_alone")
    ranks = mesh.mesh.narrow(axis, replicas.get_local_rank(), 1)
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)

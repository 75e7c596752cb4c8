"""Builds the device mesh of a `ParallelConfig`, and defines `Axis`, which collectives use.

The mesh has axes of size 1, too, so no code needs to check whether an axis exists. tp is innermost,
so that its ranks are neighbors.

Context parallelism has no axis of its own in this mesh. Its ranks share parameters, gradients and
optimizer states as data-parallel ranks do, so the axis dp_shard has dp_shard x cp ranks, and
`sequence_axis` returns the part of it that splits sequences.
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
from parallel3d.torch_private import group_of, let_gloo_finish
from parallel3d.watch.step_clock import Cause


class Role(StrEnum):
    """Purpose of a mesh axis. The value is the axis name: `mesh[Role.SPLIT_TENSORS]`.

    No other module should spell out axis names.
    """

    SPLIT_LAYERS = "pp"
    REPLICATE = "dp_replicate"
    SHARD_PARAMETERS = "dp_shard"
    SPLIT_TENSORS = "tp"


DATA_ROLES = (Role.REPLICATE, Role.SHARD_PARAMETERS)  # Axes whose ranks receive different data.
SPLIT_SEQUENCES = "cp"  # Axis of the layout that the mesh merges into SHARD_PARAMETERS.
# Axes that model classes take as arguments of these names, and why other models cannot use them.
LAYER_AXES = {SPLIT_SEQUENCES: "its attention sees only the tokens of its rank"}
_CAUSES: dict[str, Cause] = {Role.SPLIT_LAYERS: "pp_bubble", Role.SPLIT_TENSORS: "tp"}


def dp_rank(parallel: ParallelConfig, rank: int) -> int:
    """Returns the index of a rank among the `parallel.dp` data-parallel ranks."""
    coordinates = parallel.coordinates(rank)._asdict()
    place = 0
    for role in DATA_ROLES:
        place = place * parallel.axes[role] + coordinates[role]
    return place


@dataclass(frozen=True)
class Axis:
    """One axis of a device mesh, from the view of this rank.

    Built once from a DeviceMesh, whose queries take longer than a small matmul.
    """

    size: int
    rank: int  # Index of this rank along the axis.
    group: dist.ProcessGroup | None  # None if the size is 1, so that nothing is sent.
    cause: Cause = "dp"  # Cause to which the time of its collectives belongs.

    def rows(self, size: int) -> range:
        """Returns this rank's rows of a dim that is split over the axis."""
        return shard_rows(size, self.rank, self.size)

    def part(self, full: Tensor, dim: int | None) -> Tensor:
        """Returns a view of this rank's shard of `full` along `dim`, or `full` if `dim` is None."""
        if dim is None:
            return full
        rows = self.rows(full.shape[dim])
        return full.narrow(dim, rows.start, len(rows))

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # Process groups cannot be copied. Copied modules share them.

    @classmethod
    def of(cls, mesh: DeviceMesh | Axis | None) -> Axis:
        """Returns the axis of a one-dimensional mesh, or one of size 1 if `mesh` is None.

        Raises TypeError for other arguments.
        """
        if mesh is None:
            return ONE_RANK
        if isinstance(mesh, Axis):
            return mesh
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise TypeError(
                f"mesh = {mesh!r}: must be a one-dimensional DeviceMesh or None; pass an axis, for "
                "example mesh['tp']"
            )
        if mesh.size() == 1:
            return ONE_RANK
        if mesh.device_type == "cpu":
            let_gloo_finish()
        (name,) = mesh.mesh_dim_names or ("",)
        cause = _CAUSES.get(name, "dp")
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group(), cause)


ONE_RANK = Axis(1, 0, None)


def axes_of(mesh: DeviceMesh) -> dict[str, Axis]:
    """Returns all axes of a mesh by name, outermost first."""
    return {name: Axis.of(mesh[name]) for name in mesh.mesh_dim_names or ()}


def build_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh:
    """Builds the device mesh of a layout over all ranks of the default process group.

    Args:
        parallel: Layout.
        device_type: "cuda" or "cpu".

    Returns:
        Mesh with the axes pp, dp_replicate, dp_shard and tp, outermost first. Every axis exists,
        even if its size is 1. dp_shard has dp_shard x cp ranks.

    Example:
        >>> layout = parallel3d.ParallelConfig(pp=2, dp_shard=2, tp=2)
        >>> mesh = parallel3d.build_mesh(layout, "cuda")  # on 8 ranks
        >>> mesh.mesh_dim_names
        ('pp', 'dp_replicate', 'dp_shard', 'tp')
    """
    sizes = parallel.axes
    sizes[Role.SHARD_PARAMETERS] *= sizes.pop(SPLIT_SEQUENCES)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def layer_axes(mesh: DeviceMesh, parallel: ParallelConfig) -> dict[str, Axis]:
    """Returns the axes of `LAYER_AXES` by name. Collective."""
    return {SPLIT_SEQUENCES: sequence_axis(mesh, parallel.cp)}


def sequence_axis(mesh: DeviceMesh, cp: int) -> Axis:
    """Returns the axis of the `cp` ranks that share a sequence. They are adjacent on dp_shard.

    Creates a process group if cp > 1. Collective over the ranks of dp_shard.
    """
    if cp == 1:
        return ONE_RANK
    shards = mesh[Role.SHARD_PARAMETERS]
    replica, rank = divmod(shards.get_local_rank(), cp)
    ranks = shards.mesh.flatten().tolist()[replica * cp : (replica + 1) * cp]
    return Axis(cp, rank, group_of(ranks, "context_parallel"), "cp")


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """Returns the view of the mesh over which experts are sharded: the same ranks and axis names.

    Its axis tp has `ep` ranks, over which the experts are divided. Its axis dp_shard has the other
    ranks of dp_shard x tp. If ep equals tp, the view is the mesh itself. Collective.
    """
    if ep == mesh[Role.SPLIT_TENSORS].size():
        return mesh
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh.flatten(2).unflatten(2, (-1, ep))
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = [mesh[name].get_group() for name in names[:2]]
    for axis, name in ((2, "expert_shards"), (3, "experts")):
        index = [slice(None) if dim == axis else at for dim, at in enumerate(place)]
        groups.append(group_of(ranks[tuple(index)].tolist(), name))
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)


def data_ranks(mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks, including this one, that reduce gradients together."""
    return mesh[DATA_ROLES].mesh.flatten().tolist()


def replica_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of this rank's model replica: all axes, but dp_replicate has size 1.

    Code that uses it does not communicate with other replicas. Collective over the replica.
    """
    names = mesh.mesh_dim_names or ()
    replicas = mesh[Role.REPLICATE]
    if replicas.size() == 1:
        return mesh
    groups = [mesh[name].get_group() for name in names]
    axis = names.index(Role.REPLICATE)
    groups[axis] = group_of([dist.get_rank()], "replica_alone")
    ranks = mesh.mesh.narrow(axis, replicas.get_local_rank(), 1)
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)

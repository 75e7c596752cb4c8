"""The mesh: torch's DeviceMesh with every axis of ParallelConfig on it, and the process group that it stands on.

Axes of size 1 are there too, so that no code asks whether an axis exists. tp is innermost: its ranks are neighbours.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError, RendezvousError
from parallel3d.launch.rendezvous import Rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as its collectives need it: looked up once, because asking a DeviceMesh takes longer than a
    small matrix product."""

    size: int
    rank: int  # this rank's place on it
    group: dist.ProcessGroup | None  # None where nothing is ever sent

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Axis:
        """Of a one-dimensional mesh; None is an axis of size 1. Raises TypeError for what is none."""
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"{mesh!r} is no axis: pass a one-dimensional DeviceMesh, such as mesh['tp'], or None")
        if mesh is not None and mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("tp",)
            raise TypeError(f"a mesh of {mesh.ndim} dimensions is no axis; pass one of it, such as mesh[{names[-1]!r}]")
        if mesh is None or mesh.size() == 1:
            return cls(1, 0, None)
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group())


def axes_of(mesh: DeviceMesh) -> dict[str, Axis]:
    """Every axis of a mesh by its name, outermost first."""
    return {name: Axis.of(mesh[name]) for name in mesh.mesh_dim_names or ()}


def choose_device(wanted: Literal["auto", "cpu", "cuda"], rendezvous: Rendezvous) -> torch.device:
    """The device of this rank: its own GPU, or the CPU. `auto` means GPUs where this host has one for each of its
    workers. Raises ConfigError where GPUs are wanted and there are fewer."""
    gpus, workers = torch.cuda.device_count(), rendezvous.local_world_size
    if wanted == "cpu" or (wanted == "auto" and gpus < workers):
        return torch.device("cpu")
    if gpus < workers:
        raise ConfigError(
            f"train.device = cuda: {workers} workers on this host need a GPU each, and it has {gpus}; "
            f"start fewer workers here, or use train.device=cpu"
        )
    return torch.device("cuda", rendezvous.local_rank)


@contextmanager
def process_group(rendezvous: Rendezvous, device: torch.device, timeout_s: float) -> Iterator[None]:
    """The default process group, gloo on CPUs and NCCL on GPUs, from here to the end of the block, errors included.

    Raises RendezvousError where the workers do not find each other within `timeout_s`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=rendezvous.init_method,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rendezvous.rank} of {rendezvous.world_size} did not meet the others through "
            f"{rendezvous.init_method} within {timeout_s:.0f} s: {error}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh:
    """The mesh of a layout over all ranks of the default process group."""
    return init_device_mesh(device_type, tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes))


def replica_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` that holds this rank's replica of the model, with the same axes, dp_replicate of size 1. What
    is given it sends nothing to other replicas. Every rank of a replica calls it at once."""
    names = mesh.mesh_dim_names or ()
    axis, replica = names.index("dp_replicate"), mesh["dp_replicate"].get_local_rank()
    if mesh["dp_replicate"].size() == 1:
        return mesh
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="replica_alone")
    groups = [alone if name == "dp_replicate" else mesh[name].get_group() for name in names]
    ranks = mesh.mesh.narrow(axis, replica, 1)
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)

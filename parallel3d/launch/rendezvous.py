"""The place of a worker among all, where it meets the others as the launcher says it, its device and its process group.
torch is imported by the functions that need it, when a worker calls them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from parallel3d.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place of one worker among all. `init_method` is torch's name for where they meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """Reads what torchrun (or srun, or an MPI) has set. Returns None for a process that no launcher started."""
        if "RANK" in environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "MASTER_ADDR" in environ and environ.get("SLURM_NTASKS", "1") != "1":
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        else:
            return None
        rank, world_size = (_whole_number(environ, name) for name in names[:2])
        local_world_size = _whole_number(environ, names[3], default=world_size)
        local_rank = _whole_number(environ, names[2], default=rank % max(1, local_world_size))
        if rank >= world_size:
            raise ConfigError(f"{names[0]} = {rank}: must be below {names[1]} = {world_size}")
        for name, example in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "29500")):
            if not environ.get(name):
                raise ConfigError(
                    f"{name} is not set, and {names[0]} is: the launcher must set both; try {name}={example}"
                )
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            init_method="env://",
        )


def _whole_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        said = "is not set" if text is None else f"= {text}: must be a whole number"
        raise ConfigError(f"{name} {said}; unset RANK to start the workers here, or start them with torchrun")
    return int(text)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], rendezvous: Rendezvous) -> torch.device:
    """Returns the device of this rank: its own GPU, or the CPU. `auto` takes GPUs where this host has one for each of
    its workers. Raises ConfigError if `cuda` is wanted and this host has fewer GPUs than workers."""
    import torch

    gpus, workers = torch.cuda.device_count(), rendezvous.local_world_size
    if wanted == "cuda" and gpus < workers:
        raise ConfigError(
            f"train.device = cuda: {workers} workers on this host need a GPU each, and it has {gpus}; "
            f"start fewer workers here, or use train.device=cpu"
        )
    has_gpu = wanted != "cpu" and gpus >= workers
    return torch.device("cuda", rendezvous.local_rank) if has_gpu else torch.device("cpu")


@contextmanager
def process_group(rendezvous: Rendezvous, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Holds the default process group open for a block: gloo on CPUs, NCCL on GPUs. The group is closed at the end of
    the block, also after an error. Raises RendezvousError if the workers do not find each other in `timeout_s`."""
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            {"cpu": "gloo", "cuda": "nccl"}[device.type],
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

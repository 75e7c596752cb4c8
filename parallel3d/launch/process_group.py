"""The device and the process group of a worker. torch is imported by the functions, when a worker calls them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from parallel3d.errors import ConfigError, RendezvousError
from parallel3d.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    import torch

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def choose_device(wanted: Literal["auto", "cpu", "cuda"], rendezvous: Rendezvous) -> torch.device:
    """Returns the device of this rank: its own GPU, or the CPU. `auto` takes GPUs where this host has one for each of
    its workers. Raises ConfigError if `cuda` is wanted and this host has fewer GPUs than workers."""
    import torch

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
    """Holds the default process group open for a block: gloo on CPUs, NCCL on GPUs. The group is closed at the end of
    the block, also after an error. Raises RendezvousError if the workers do not find each other in `timeout_s`."""
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            _BACKENDS[device.type],
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

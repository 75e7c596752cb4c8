"""Chooses the device of each rank, and checks the devices of all ranks at the rendezvous.

A launcher can show each rank all GPUs of its host, or only one, which then is device 0 on every
rank. A rank alone therefore cannot tell whether it shares its GPU with another rank."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parallel3d.errors import ConfigError
from parallel3d.launch.failure import any_ranks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Host, process and GPU of a rank."""

    host: str
    pid: int
    # Process IDs are comparable only within one PID namespace of one host.
    pid_namespace: str = ""
    gpu: str = ""  # ID that is unique over all hosts; "" for a rank on the CPU.
    problem: str = ""  # Error message if the rank has no device.

    @classmethod
    def of_this_process(cls, device: torch.device, problem: str = "") -> Place:
        """Returns the place of this process. `problem` is the error if it has no device."""
        host = socket.gethostname()
        namespace = ""
        gpu = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        if device.type == "cuda":
            import torch

            # NCCL rejects two ranks on one GPU of a host. NCCL_HOSTID replaces the host's name.
            uuid = torch.cuda.get_device_properties(device).uuid
            gpu = f"{os.environ.get('NCCL_HOSTID', host)}/{uuid}"
        return cls(host=host, pid=os.getpid(), pid_namespace=namespace, gpu=gpu, problem=problem)


def choose_device(wanted: DeviceName, local_rank: int) -> torch.device:
    """Returns a GPU if one is visible and `wanted` is not "cpu", else the CPU.

    The GPU is number `local_rank` modulo their count. If none is visible, raises ConfigError
    for "cuda", and for "auto" if torch supports GPUs and the host has NVIDIA GPUs, unless
    CUDA_VISIBLE_DEVICES hides them on purpose (empty or -1)."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and wanted != "cpu":
        return torch.device("cuda", local_rank % gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    may_use_cpu = visible in ("", "-1") or not _has_hidden_gpus()
    if wanted == "cpu" or (wanted == "auto" and may_use_cpu):
        return torch.device("cpu")
    raise ConfigError(
        f"train.device = {wanted}: torch does not see a GPU (CUDA_VISIBLE_DEVICES = {visible}); "
        "request one GPU per worker from the launcher, or use train.device=cpu"
    )


def _has_hidden_gpus() -> bool:
    import torch

    is_built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return is_built_for_gpus and any(Path("/dev").glob("nvidia[0-9]*"))


def has_gpu_files() -> bool:
    """Returns True if this host has a GPU device file (CUDA, ROCm, WSL or Jetson). Always True on
    systems other than Linux."""
    names = ("nvidia[0-9]*", "kfd", "dxg", "nvmap")
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in names)


def exchange_places(store: dist.Store, rank: int, world_size: int, own: Place) -> list[Place]:
    """Writes this rank's place to the store and returns the places of all ranks. If the store times
    out, raises a RuntimeError that names the missing ranks."""
    keys = [f"place/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps(asdict(own)))
    try:
        found = store.multi_get(keys)
    except RuntimeError as error:
        missing = [each for each in range(world_size) if not store.check([keys[each]])]
        raise RuntimeError(f"{any_ranks(missing)} of {world_size} did not connect") from error
    return [Place(**json.loads(place)) for place in found]


def check_places(places: Sequence[Place], wanted: DeviceName) -> None:
    """Raises the same ConfigError on all ranks if a rank has no device, if only some ranks have a
    GPU, or if ranks share a GPU."""
    ranks_of = defaultdict(list)
    for rank, place in enumerate(places):
        if place.problem:
            raise ConfigError(f"{place.problem} (rank {rank}, {place.host})")
        ranks_of[place.gpu].append(rank)
    for gpu, ranks in ranks_of.items():
        who = f"train.device = {wanted}: {any_ranks(ranks)} ({places[ranks[0]].host})"
        if not gpu and len(ranks) < len(places):
            raise ConfigError(
                f"{who} see no GPU, but the others do; request one GPU per worker from the "
                "launcher, or use train.device=cpu"
            )
        if gpu and len(ranks) > 1:
            raise ConfigError(
                f"{who} share one GPU; start fewer workers there, or use train.device=cpu"
            )

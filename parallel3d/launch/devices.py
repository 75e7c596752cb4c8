"""The device of each rank, and where every rank runs, as all tell each other when they meet.

A rank takes a GPU wherever it sees one. Whether each rank has one of its own is known only when all
have met: a launcher may show each rank every GPU of its host, or only the rank's own one, which
then is every rank's first."""

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
    """The host, process and GPU of a rank."""

    host: str
    pid: int
    # a process id means something to processes of the same host and namespace alone
    pid_namespace: str = ""
    gpu: str = ""  # names one GPU among those of all hosts; "" for a rank on the CPU
    problem: str = ""  # why the rank has no device

    @classmethod
    def of_this_process(cls, device: torch.device, problem: str = "") -> Place:
        """Returns the place of this process, which computes on `device`, or cannot for the reason
        in `problem`."""
        host = socket.gethostname()
        namespace = ""
        gpu = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        if device.type == "cuda":
            import torch

            # NCCL refuses two ranks of one host on one GPU, and NCCL_HOSTID is how to tell it that
            # they are on two.
            uuid = torch.cuda.get_device_properties(device).uuid
            gpu = f"{os.environ.get('NCCL_HOSTID', host)}/{uuid}"
        return cls(host=host, pid=os.getpid(), pid_namespace=namespace, gpu=gpu, problem=problem)


def choose_device(wanted: DeviceName, local_rank: int) -> torch.device:
    """Returns the device of this rank, which is number `local_rank` on its host: a GPU if it sees
    one, else the CPU. Raises ConfigError if it sees none and one is wanted, or is there and hidden.
    An empty CUDA_VISIBLE_DEVICES hides GPUs on purpose."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and wanted != "cpu":
        return torch.device("cuda", local_rank % gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    may_use_cpu = visible in ("", "-1") or not _has_hidden_gpus()
    if wanted == "cpu" or (wanted == "auto" and may_use_cpu):
        return torch.device("cpu")
    raise ConfigError(
        f"train.device = {wanted}: torch sees no GPU here (CUDA_VISIBLE_DEVICES = {visible}); ask "
        "the launcher for a GPU for each worker, or use train.device=cpu"
    )


def _has_hidden_gpus() -> bool:
    import torch

    is_built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return is_built_for_gpus and any(Path("/dev").glob("nvidia[0-9]*"))


def has_gpu_files() -> bool:
    """Returns whether there is a file of any GPU, of CUDA, ROCm, WSL or a Jetson; True where this
    is not Linux."""
    names = ("nvidia[0-9]*", "kfd", "dxg", "nvmap")
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in names)


def exchange_places(store: dist.Store, rank: int, world_size: int, own: Place) -> list[Place]:
    """Tells all ranks where this one runs and returns the places of all, by rank. Raises
    RuntimeError with the ranks that do not come in the store's time."""
    keys = [f"place/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps(asdict(own)))
    try:
        found = store.multi_get(keys)
    except RuntimeError as error:
        missing = [each for each in range(world_size) if not store.check([keys[each]])]
        raise RuntimeError(f"{any_ranks(missing)} of {world_size} did not come") from error
    return [Place(**json.loads(place)) for place in found]


def check_places(places: Sequence[Place], wanted: DeviceName) -> None:
    """Raises ConfigError, on all ranks alike, if a rank has no device, some ranks have a GPU and
    others none, or several have the same one."""
    ranks_of = defaultdict(list)
    for rank, place in enumerate(places):
        if place.problem:
            raise ConfigError(f"{place.problem} (rank {rank}, {place.host})")
        ranks_of[place.gpu].append(rank)
    for gpu, ranks in ranks_of.items():
        who = f"train.device = {wanted}: {any_ranks(ranks)} ({places[ranks[0]].host})"
        if not gpu and len(ranks) < len(places):
            raise ConfigError(
                f"{who} see no GPU, and the others do; ask the launcher for a GPU for each worker, "
                "or use train.device=cpu"
            )
        if gpu and len(ranks) > 1:
            raise ConfigError(
                f"{who} share one GPU; start fewer workers there, or use train.device=cpu"
            )

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
from collections.abc import Mapping, Sequence
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
    def of_this_process(
        cls, device: torch.device, problem: str = "", environ: Mapping[str, str] = os.environ
    ) -> Place:
        """Returns the place of this process, which computes on `device`, or cannot for the reason
        in `problem`."""
        host, namespace, gpu = socket.gethostname(), "", ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        if device.type == "cuda":
            import torch

            # NCCL refuses two ranks of one host on one GPU, and NCCL_HOSTID is how to tell it that
            # they are on two.
            gpu = f"{environ.get('NCCL_HOSTID', host)}/{torch.cuda.get_device_properties(device).uuid}"  # noqa: E501
        return cls(host=host, pid=os.getpid(), pid_namespace=namespace, gpu=gpu, problem=problem)


def choose_device(wanted: DeviceName, local_rank: int) -> torch.device:
    """Returns the device of this rank, which is number `local_rank` on its host: a GPU where it
    sees one, else the CPU. Raises ConfigError where it sees none and one is wanted, or is there and
    hidden."""
    import torch

    is_built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    has_hidden = is_built_for_gpus and any(Path("/dev").glob("nvidia[0-9]*"))
    index = gpu_index(wanted, local_rank, gpus=torch.cuda.device_count(), has_hidden=has_hidden)
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def gpu_index(
    wanted: DeviceName,
    local_rank: int,
    *,
    gpus: int,
    has_hidden: bool,
    environ: Mapping[str, str] = os.environ,
) -> int | None:
    """Returns which of the `gpus` that a process sees it takes, or None for the CPU. `has_hidden`
    says that its host has GPUs that the process may not see; an empty CUDA_VISIBLE_DEVICES hides
    them on purpose."""
    if wanted == "cpu":
        return None
    if gpus:
        return local_rank % gpus
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted == "auto" and (not has_hidden or visible in ("", "-1")):
        return None
    sees = "" if visible is None else f" (CUDA_VISIBLE_DEVICES = {visible})"
    has = (
        "this host has GPUs, and torch sees none of them"
        if has_hidden
        else "torch sees no GPU here"
    )
    raise ConfigError(
        f"train.device = {wanted}: {has}{sees}; ask the launcher for a GPU for each worker, or use "
        "train.device=cpu"
    )


def has_gpu_files() -> bool:
    """Returns whether there is a file of any GPU, of CUDA, ROCm, WSL or a Jetson; True where this
    is not Linux."""
    names = ("nvidia[0-9]*", "kfd", "dxg", "nvmap")
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in names)


def refuse_without_torch(wanted: DeviceName) -> None:
    """Raises ConfigError where a GPU is wanted and there is no file of one: torch would take
    seconds to say so."""
    if wanted == "cuda" and not has_gpu_files():
        gpu_index(wanted, 0, gpus=0, has_hidden=False)


def exchange_places(store: dist.Store, rank: int, world_size: int, own: Place) -> list[Place]:
    """Tells all ranks where this one runs and returns the places of all, by rank. Raises what the
    store does where a rank does not come in the store's time, on rank 0 with the ranks that are
    missing."""
    store.set(f"place/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        try:
            told = [json.loads(store.get(f"place/{each}")) for each in range(world_size)]
        except RuntimeError as error:
            missing = [each for each in range(world_size) if not store.check([f"place/{each}"])]
            raise RuntimeError(f"{any_ranks(missing)} of {world_size} did not come") from error
        store.set("places", json.dumps(told))
    return [Place(**place) for place in json.loads(store.get("places"))]


def check_places(places: Sequence[Place], wanted: DeviceName) -> None:
    """Raises ConfigError, on all ranks alike, where a rank has no device, some ranks have a GPU and
    others none, or several have the same one."""
    in_trouble = [rank for rank, place in enumerate(places) if place.problem]
    if in_trouble:
        first = places[in_trouble[0]]
        is_about_all = len(in_trouble) == len(places)
        where = "" if is_about_all else f" (on {any_ranks(in_trouble)}, {first.host})"
        raise ConfigError(f"{first.problem}{where}")
    ranks_of = defaultdict(list)
    for rank, place in enumerate(places):
        ranks_of[place.gpu].append(rank)
    for gpu, ranks in ranks_of.items():
        host = places[ranks[0]].host
        problem = ""
        if not gpu and len(ranks) < len(places):
            problem = (
                f"{any_ranks(ranks)} ({host}) see no GPU, and the others do; ask the launcher for "
                "a GPU for each worker"
            )
        elif gpu and len(ranks) > 1:
            own = len({place.gpu for place in places if place.host == host})
            problem = (
                f"{any_ranks(ranks)} share one GPU of {host}, and each needs its own; start at "
                f"most {own} worker{'s' * (own > 1)} there"
            )
        if problem:
            raise ConfigError(f"train.device = {wanted}: {problem}, or use train.device=cpu")


def tp_warning(hosts: Sequence[str], tp: int) -> str | None:
    """Returns a line for the user where the ranks of a tp group, which are neighbours, are on
    several hosts. `hosts` are by rank."""
    for first in range(0, len(hosts), tp):
        spanned = {*hosts[first : first + tp]}
        if len(spanned) > 1:
            most = max(hosts.count(host) for host in spanned)
            ranks = f"ranks {first} to {first + tp - 1} are on {len(spanned)} hosts"
            return (
                f"parallel.tp = {tp}: {ranks}, and tp sends in every layer; a host has {most} of "
                "the workers: try a parallel.tp that divides them"
            )
    return None

"""Runs a function on local processes with a process group: gloo with one thread each on CPUs, NCCL
on GPUs."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from parallel3d.config.import_class import BESIDE_RECIPES
from parallel3d.errors import Parallel3dError, RankError
from parallel3d.launch.local import start_fork_server

T = TypeVar("T")
CPU = torch.device("cpu")
_TIMEOUT_S = 300.0
# With these variables and NCCL_HOSTID, NCCL treats each rank as a separate host and communicates
# through sockets, so that ranks can share a GPU.
_OWN_HOST = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}


def run_ranks(
    function: Callable[..., T], *arguments: object, world_size: int, device: str = "cpu"
) -> T:
    """Calls `function(*arguments)` on `world_size` ranks and returns the result of rank 0.

    Arguments and results are pickled. With `device` "cuda" the current device of each rank is its
    GPU. Ranks share GPUs if the host has fewer. If a rank raises a Parallel3dError, it is raised
    here. If a rank dies or raises another error, whose traceback is on stderr, RankError is raised.
    In both cases the other ranks are stopped.
    """
    # The fork server imports the modules once, which saves seconds per process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    start_fork_server()
    processes: list[ForkServerProcess] = []
    rank_of: dict[Any, int] = {}  # Rank of each worker, keyed by the pipe for its result.
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                place = (f"file://{folder}/rendezvous", rank, world_size)
                args = (sender, place, device, function, arguments, BESIDE_RECIPES)
                process = context.Process(target=_rank, args=args, daemon=True)
                process.start()
                sender.close()  # Closed here, so that reading from a dead rank raises EOFError.
                processes.append(process)
                rank_of[receiver] = rank
            while rank_of:
                for report in wait(list(rank_of)):
                    rank = rank_of.pop(report)
                    try:
                        results[rank] = cast(Connection, report).recv()
                    except EOFError:
                        died = f"rank {rank} of {world_size} died before it returned a result"
                        raise RankError(died) from None
                    if isinstance(results[rank], Parallel3dError):
                        raise results[rank]
            return results[0]
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _rank(
    sender: Connection,
    place: tuple[str, int, int],
    device: str,
    function: Callable[..., object],
    arguments: tuple[object, ...],
    beside_recipes: list[str],
) -> None:
    BESIDE_RECIPES.extend(beside_recipes)
    init_method, rank, world_size = place
    torch.set_num_threads(1)
    # Silence a warning that advises flattening the mesh. torch has no public function for that.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(device_of_rank(device, rank, world_size))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
    )
    try:
        sender.send(function(*arguments))
    except Parallel3dError as error:
        sender.send(error)
    dist.destroy_process_group()


def device_of_rank(device: str, rank: int, world_size: int) -> torch.device:
    """Returns the device of a rank on this host.

    Call it before NCCL starts. If there are fewer GPUs than ranks, it sets environment variables
    that let ranks share GPUs."""
    if device != "cuda":
        return CPU
    gpus = max(1, torch.cuda.device_count())
    if gpus < world_size:
        os.environ.update(_OWN_HOST, NCCL_HOSTID=f"r{rank}")
    return torch.device("cuda", rank % gpus)


def own_device(device: str) -> torch.device:
    """Returns the device of this rank inside `run_ranks`."""
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return CPU

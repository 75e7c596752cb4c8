"""The place of a worker among all, where it meets the others as the launcher says it, and its
process group. torch is imported by the functions that need it, when a worker calls them."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError, PreemptedError, RendezvousError
from parallel3d.launch.devices import (
    Place,
    check_places,
    choose_device,
    exchange_places,
    tp_warning,
)
from parallel3d.launch.failure import Failure, record_flights
from parallel3d.launch.peer_monitor import PeerMonitor
from parallel3d.launch.signals import ignore_stop_signals
from parallel3d.watch.heartbeat import beats_to_file

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_STORE_S = 10.0  # a store that takes longer to answer is gone


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place of one worker among all. `init_method` is torch's name for where they meet,
    `attempt` what tells this start of the workers from earlier ones at the same store, and
    `is_restart` says that the launcher has started the run again (`attempt.join_attempt` sets
    both)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str
    attempt: str = ""
    is_restart: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """Reads what torchrun (or srun, or an MPI) has set. Returns None for a process that no
        launcher started."""
        if "RANK" in environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "MASTER_ADDR" in environ and environ.get("SLURM_NTASKS", "1") != "1":
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
        else:
            return None
        rank, world_size = (_whole_number(environ, name) for name in names[:2])
        nodes = _whole_number(environ, "SLURM_NNODES", default=1)
        nodes = _whole_number(environ, "SLURM_STEP_NUM_NODES", default=nodes)
        on_the_fullest_node = -(-world_size // max(1, nodes))
        local_world_size = _whole_number(environ, names[3], default=on_the_fullest_node)
        local_rank = _whole_number(environ, names[2], default=rank % max(1, local_world_size))
        if rank >= world_size:
            raise ConfigError(f"{names[0]} = {rank}: must be below {names[1]} = {world_size}")
        for name, example in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "29500")):
            if not environ.get(name):
                raise ConfigError(
                    f"{name} is not set, and {names[0]} is: the launcher must set both; try "
                    f"{name}={example}"
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
        problem = "is not set" if text is None else f"= {text}: must be a whole number"
        raise ConfigError(
            f"{name} {problem}; unset RANK to start the workers here, or start them with torchrun"
        )
    return int(text)


@contextmanager
def process_group(recipe: Recipe, rendezvous: Rendezvous) -> Iterator[torch.device]:
    """Holds the default process group open for a block, which gets the device of this rank.

    The group uses gloo, and NCCL for tensors on GPUs. Objects, barriers and background saves go
    over gloo, because the queue of a GPU is in order and may be long. Raises RendezvousError if the
    workers do not meet in train.start_timeout_s, and ConfigError on all ranks if their devices do
    not fit.

    The group is closed at the end of the block, and if the run was preempted, as it is on all ranks
    at once. After any other error it stays open, because NCCL would wait for peers that do not
    come; the process then ends by `end_process`. If `launch_local` does not monitor the ranks, they
    monitor each other, and the error is a ReportedError."""
    import torch
    import torch.distributed as dist

    device, problem = torch.device("cpu"), ""
    try:
        device = choose_device(recipe.train.device, rendezvous.local_rank)
    except ConfigError as error:  # other ranks would wait for this one, so it meets them first
        problem = str(error)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        record_flights(recipe.run_dir, rendezvous.rank)
    rank, size, timeout_s = rendezvous.rank, rendezvous.world_size, recipe.train.start_timeout_s
    coordinates = [str(recipe.parallel.coordinates(each)) for each in range(size)]
    monitor: PeerMonitor | None = None
    beats: AbstractContextManager[None] = nullcontext()
    try:
        places = _meet(recipe, rendezvous, device, problem)
        if rendezvous.init_method == "env://" and size > 1:
            connect = partial(connect_to_store, f"parallel3d/{rendezvous.attempt}")
            monitor = PeerMonitor(connect, rank, places, coordinates, recipe.run_dir)
        elif rendezvous.init_method.startswith("file://") and size > 1:  # of launch_local
            folder = Path(rendezvous.init_method.removeprefix("file://")).parent
            beats = beats_to_file(folder / f"beat_{rank}")
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rank} of {size} did not meet the others through {rendezvous.init_method} "
            f"within {timeout_s:.0f} s: {error}"
        ) from error
    warning = tp_warning([place.host for place in places], recipe.parallel.tp)
    if rank == 0 and warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    try:
        with beats:
            yield device
    except PreemptedError:
        ignore_stop_signals()
        _leave(monitor)
        raise
    except (Exception, SystemExit) as error:
        if monitor is None:
            raise
        ignore_stop_signals()  # launchers send them when a peer ends
        failure = Failure.of(error, rank, coordinates[rank]).with_record(recipe.run_dir)
        raise monitor.report(failure) from error
    _leave(monitor)


def _meet(
    recipe: Recipe, rendezvous: Rendezvous, device: torch.device, problem: str
) -> list[Place]:
    """Makes the default process group. Returns the places of all ranks."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous as meet

    rank, size = rendezvous.rank, rendezvous.world_size
    timeout = datetime.timedelta(seconds=recipe.train.start_timeout_s)
    # A server for one worker answers at once; one for all would not say who is missing.
    waited_for = 1 if rendezvous.init_method == "env://" else size
    store, _, _ = next(meet(rendezvous.init_method, rank, waited_for, timeout=timeout))
    store.set_timeout(timeout)
    if rendezvous.attempt:
        store = dist.PrefixStore(rendezvous.attempt, store)
    own = Place.of_this_process(device, problem)
    places = exchange_places(dist.PrefixStore("parallel3d", store), rank, size, own)
    check_places(places, recipe.train.device)
    dist.init_process_group(
        # [Note: device_id] There is no `device_id`: with it torch makes each later group by
        # splitting NCCL's communicator of all ranks, which all ranks must enter, also those
        # that are not in the group.
        {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device.type],
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return places


def _leave(monitor: PeerMonitor | None) -> None:
    """Closes the group when no rank monitors the others any more. Before, the end of a process
    would be a failure."""
    import torch.distributed as dist

    if monitor is not None:
        monitor.close()
        dist.barrier()
    dist.destroy_process_group()


def connect_to_store(prefix: str) -> dist.Store:
    """Opens a connection to the store of the ranks that torchrun or srun has started, for keys
    below `prefix`. Raises OSError where nobody listens, and RuntimeError where nobody answers."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # refused at once where torch would try again and again
    socket.create_connection((host, port), _STORE_S).close()
    timeout = datetime.timedelta(seconds=_STORE_S)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(prefix, store)

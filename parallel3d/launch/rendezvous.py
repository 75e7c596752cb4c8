"""The place of a worker among all, where it meets the others as the launcher says it, and its process group. torch is
imported by the functions that need it, when a worker calls them."""

from __future__ import annotations

import datetime
import os
import re
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
from parallel3d.launch.devices import Place, check_places, choose_device, exchange_places, tp_warning
from parallel3d.launch.failure import Failure, record_flights
from parallel3d.launch.peer_watch import PeerWatch
from parallel3d.launch.signals import ignore_stop_signals
from parallel3d.watch.pulse import Pulse, beating_into

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_STORE_S = 10.0  # a store that takes longer to answer is gone


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place of one worker among all. `init_method` is torch's name for where they meet, `attempt` what tells this
    start of the workers from earlier ones at the same store, and `is_restart` says that the launcher has started the
    run again (`attempt.join_attempt` sets both)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str
    attempt: str = ""
    is_restart: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """Reads what torchrun (or srun, or an MPI) has set. Returns None for a process that no launcher started."""
        if "RANK" in environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "MASTER_ADDR" in environ and environ.get("SLURM_NTASKS", "1") != "1":
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
        else:
            return None
        rank, world_size = (_whole_number(environ, name) for name in names[:2])
        local_world_size = _whole_number(environ, names[3], default=_tasks_on_this_node(environ, world_size))
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


def _tasks_on_this_node(environ: Mapping[str, str], world_size: int) -> int:
    """Returns how many tasks SLURM has started on this node. It tells the numbers of all nodes in their order, such as
    `4,2(x3)` for 4, 2, 2 and 2, or one number for all of them. Without SLURM there is one node."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if text := environ.get(name):
            if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
                raise ConfigError(f"{name} = {text}: must be numbers of tasks, such as 8, 8(x2) or 4,2(x3)")
            runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
            tasks = [int(number) for number, times in runs for _ in range(int(times or 1))]
            return tasks[min(_whole_number(environ, "SLURM_NODEID", default=0), len(tasks) - 1)]
    nodes = next((_whole_number(environ, n) for n in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if n in environ), 1)
    return -(-world_size // max(1, nodes))


@contextmanager
def process_group(recipe: Recipe, rendezvous: Rendezvous, pulse: Pulse | None = None) -> Iterator[torch.device]:
    """Holds the default process group open for a block, which gets this rank's device. The group is of gloo, and of
    NCCL beside it where ranks compute on GPUs: objects, barriers and what is saved in the background then go over gloo,
    because a GPU's queue is in order and may be long. Raises RendezvousError if the workers do not find each other in
    train.start_timeout_s, and ConfigError on all ranks if their devices do not fit. `pulse` makes
    this rank's signs of life, for those that watch.

    The group is closed at the end of the block, also where the run was pre-empted, as it is on all ranks at once. After
    any other error the group stays as it is, because NCCL would wait for peers that do not come: the process reports
    the error and ends by `end_process`. Where `launch_local` does not watch the ranks, they watch each other, and the
    error is a SettledError."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous as meet

    rank, size, timeout = rendezvous.rank, rendezvous.world_size, recipe.train.start_timeout_s
    device, problem = torch.device("cpu"), ""
    try:
        device = choose_device(recipe.train.device, rendezvous.local_rank)
    except ConfigError as error:  # all ranks are to know of it, and none to wait for this one
        problem = str(error)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        record_flights(recipe.run_dir, rank)
    watch, pulse = None, pulse or Pulse()
    beating: AbstractContextManager[None] = nullcontext()
    try:
        timedelta = datetime.timedelta(seconds=timeout)
        # A server for one worker answers at once. One for all would wait for all, and not say who is missing.
        waited_for = 1 if rendezvous.init_method == "env://" else size
        store, _, _ = next(meet(rendezvous.init_method, rank, waited_for, timeout=timedelta))
        store.set_timeout(timedelta)
        if rendezvous.attempt:
            store = dist.PrefixStore(rendezvous.attempt, store)
        own = Place.of_this_process(device, problem)
        places = exchange_places(dist.PrefixStore("parallel3d", store), rank, size, own)
        check_places(places, recipe.train.device)
        dist.init_process_group(
            # [Note: device_id] There is no `device_id`: with it torch makes each later group by splitting NCCL's
            # communicator of all ranks, which all ranks must enter, also those that are not in the group.
            {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device.type],
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta,
        )
        if rendezvous.init_method == "env://" and size > 1:  # launch_local's workers meet through a file
            coordinates = [str(recipe.parallel.coordinates(each)) for each in range(size)]
            connect = partial(connect_to_store, f"parallel3d/{rendezvous.attempt}")
            watch = PeerWatch(connect, rank, places, coordinates.__getitem__, recipe.run_dir, pulse)
        elif rendezvous.init_method.startswith("file://") and size > 1:
            beating = beating_into(Path(rendezvous.init_method.removeprefix("file://")).parent, rank, pulse)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rank} of {size} did not meet the others through {rendezvous.init_method} within {timeout:.0f} s: "
            f"{error}"
        ) from error
    if rank == 0 and (warning := tp_warning(places, recipe.parallel.tp)):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    try:
        with beating:
            yield device
    except PreemptedError:
        ignore_stop_signals()
        _leave(watch)
        raise
    except (Exception, SystemExit) as error:
        if watch is None:
            raise
        ignore_stop_signals()  # a launcher sends them as soon as it sees a peer end, and this rank has not told why
        failure = Failure.of(error, rank, coordinates[rank]).with_record(recipe.run_dir)
        raise watch.settle(failure) from error
    _leave(watch)


def _leave(watch: PeerWatch | None) -> None:
    """Closes the group, when no rank watches the others any more: the end of a process would be a failure."""
    import torch.distributed as dist

    if watch is not None:
        watch.close()
        dist.barrier()
    dist.destroy_process_group()


def connect_to_store(prefix: str) -> dist.Store:
    """Opens a connection to the store of the ranks that torchrun or srun has started, for keys below `prefix`. Raises
    OSError where nobody listens, and RuntimeError where nobody answers."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    socket.create_connection((host, port), _STORE_S).close()  # refused at once where torch would try again and again
    timeout = datetime.timedelta(seconds=_STORE_S)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(prefix, store)

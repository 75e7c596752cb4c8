"""The place of a worker among all, where it meets the others as the launcher says it, and its
process group. torch is imported by the functions that need it, when a worker calls them.

`join_attempt` tells one attempt of a run from earlier ones. torchrun restarts a failed run at the
same store, which still has the keys of the failed attempt: addresses at which nobody listens. Each
agent counts restarts by itself, so no number in the environment is new in each attempt and the same
on all ranks. So rank 0 draws a name, and gives it to each rank under a key that only this process
knows.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError, PreemptedError, RendezvousError
from parallel3d.launch.devices import Place, check_places, choose_device, exchange_places
from parallel3d.launch.failure import Failure, any_ranks, record_flights
from parallel3d.launch.peer_monitor import PeerMonitor
from parallel3d.launch.signals import die_with_the_parent, ignore_stop_signals

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_STORE_S = 10.0  # a store that takes longer to answer is gone
_POLL_S = 0.05
_STARTED = "started"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place of one worker among all. `init_method` is torch's name for where they meet,
    `attempt` what tells this start of the workers from earlier ones at the same store, and
    `is_restart` says that the launcher has started the run again (`join_attempt` sets both)."""

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
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if "RANK" not in environ:
            if "MASTER_ADDR" not in environ or environ.get("SLURM_NTASKS", "1") == "1":
                return None
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        for name in (*names[:2], "MASTER_PORT"):
            if not environ.get(name, "").isdecimal():
                raise ConfigError(
                    f"{name} = {environ.get(name)}: must be a whole number; unset {names[0]} to "
                    "start the workers here, or start them with torchrun"
                )
        rank = int(environ[names[0]])
        world_size = int(environ[names[1]])
        nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1
        on_the_fullest_node = -(-world_size // int(nodes))
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", on_the_fullest_node))
        if rank >= world_size or not environ.get("MASTER_ADDR"):
            raise ConfigError(
                f"{names[0]} = {rank}: must be below {names[1]} = {world_size}, and MASTER_ADDR "
                "must name the host of rank 0; start the workers with torchrun"
            )
        return cls(
            rank=rank,
            local_rank=int(environ.get(names[2], rank % local_world_size)),
            world_size=world_size,
            local_world_size=local_world_size,
            init_method="env://",
        )


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

    device = torch.device("cpu")
    problem = ""
    try:
        device = choose_device(recipe.train.device, rendezvous.local_rank)
    except ConfigError as error:  # other ranks would wait for this one, so it meets them first
        problem = str(error)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        record_flights(recipe.run_dir)
    rank = rendezvous.rank
    size = rendezvous.world_size
    timeout_s = recipe.train.start_timeout_s
    monitor: PeerMonitor | None = None
    try:
        places = _meet(recipe, rendezvous, device, problem)
        if rendezvous.init_method == "env://" and size > 1:
            store = connect_to_store(f"parallel3d/{rendezvous.attempt}")
            monitor = PeerMonitor(store, rank, places, recipe)
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rank} of {size} did not meet the others through {rendezvous.init_method} "
            f"within {timeout_s:.0f} s: {error}"
        ) from error
    try:
        yield device
    except PreemptedError:
        ignore_stop_signals()
        _leave(monitor)
        raise
    except (Exception, SystemExit) as error:
        if monitor is None:
            raise
        ignore_stop_signals()  # launchers send them when a peer ends
        raise monitor.report(Failure.of(error, rank, recipe.parallel)) from error
    _leave(monitor)


def _meet(
    recipe: Recipe, rendezvous: Rendezvous, device: torch.device, problem: str
) -> list[Place]:
    """Makes the default process group. Returns the places of all ranks."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous as meet

    rank = rendezvous.rank
    size = rendezvous.world_size
    timeout = timedelta(seconds=recipe.train.start_timeout_s)
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


def connect_to_store(prefix: str, timeout_s: float = _STORE_S) -> dist.Store:
    """Opens a connection to the store of the ranks that torchrun or srun has started, for keys
    below `prefix`. Raises OSError if nobody listens, and RuntimeError if nobody answers."""
    import torch.distributed as dist

    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # This is refused at once; torch would try again and again.
    socket.create_connection((host, port), _STORE_S).close()
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(prefix, store)


def was_requeued() -> bool:
    """True if SLURM has started this job again, after a failure or a preemption."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def join_attempt(rendezvous: Rendezvous, timeout_s: float) -> Rendezvous:
    """Returns the rendezvous with the name of this attempt, and whether an earlier attempt has
    started the run. Every rank calls it. Raises RendezvousError if not all ranks come in time.
    Other launchers than torchrun make a store for each attempt."""
    if not _is_of_torchrun():
        return replace(rendezvous, is_restart=was_requeued())
    die_with_the_parent()  # torchrun leaves its workers behind if it is killed
    rank = rendezvous.rank
    size = rendezvous.world_size
    own_key = f"{uuid4().hex} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = _store_of_torchrun(timeout_s)
        store.set(f"here/{rank}", own_key)
        if rank == 0:
            invitation = _invite(store, size, timeout_s)
        else:
            invitation = json.loads(store.get(f"invited/{own_key}"))
            store.add(f"{invitation['attempt']}/joined", 1)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {size} did not meet the others in {timeout_s:.0f} s: {error}"
        ) from error
    return replace(rendezvous, **invitation)


def record_start() -> None:
    """Records at torchrun's store that the run has started. A restart then resumes it."""
    if _is_of_torchrun():
        _store_of_torchrun(10.0).set(_STARTED, "")


def _is_of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_of_torchrun(timeout_s: float) -> dist.Store:
    return connect_to_store(f"parallel3d/{os.environ['TORCHELASTIC_RUN_ID']}", timeout_s)


def _invite(store: dist.Store, size: int, timeout_s: float) -> dict[str, Any]:
    """Invites every process that says it is here, until all ranks have joined. Processes of an
    earlier attempt are invited too, and do not answer. If the store is new but an agent has
    restarted before, the store was lost with its node, and the run had started."""
    is_new = store.add("attempts", 1) == 1
    started = store.check([_STARTED]) or was_requeued()
    attempt = uuid4().hex
    deadline = time.monotonic() + timeout_s
    here = [f"here/{rank}" for rank in range(size)]
    invited = set[str]()
    while time.monotonic() < deadline:
        if store.check(here):
            keys = {key.decode() for key in store.multi_get(here)}
            was_restarted = any(key.split()[1] != "0" for key in keys)
            is_restart = started or (is_new and was_restarted)
            invitation = {"attempt": attempt, "is_restart": is_restart}
            for key in keys - invited:
                store.set(f"invited/{key}", json.dumps(invitation))
            invited |= keys
            if store.add(f"{attempt}/joined", 0) == size - 1:
                return invitation
        time.sleep(_POLL_S)
    missing = [rank for rank in range(size) if not store.check([here[rank]])]
    who = f"{any_ranks(missing)} did not come" if missing else "some ranks did not answer"
    raise RuntimeError(who)

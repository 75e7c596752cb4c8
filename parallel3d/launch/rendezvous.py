"""Connects the workers: reads their ranks, lets them meet, and opens the default process group.
torch is imported only by functions that workers call.

An attempt is one start of all workers. torchrun restarts a failed run at the same store, which
still contains the keys and dead addresses of earlier attempts. Its agents count restarts
separately, so no number in the environment is both new in each attempt and equal on all ranks.
Therefore rank 0 draws a random name for the attempt and sends it to each worker under a key that
only this worker reads (`join_attempt`)."""

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

_STORE_S = 10.0  # Seconds after which a store without an answer counts as lost.
_POLL_S = 0.05
_STARTED = "started"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Ranks and world sizes of one worker, and where it meets the others.

    Attributes:
        init_method: URL of the rendezvous, as in `torch.distributed.init_process_group`.
        attempt: Name of this attempt, or "" if each attempt has a new store.
        is_restart: True if an earlier attempt has started the run.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str
    attempt: str = ""
    is_restart: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """Reads the variables of torchrun, or of srun with several tasks and MASTER_ADDR. Returns
        None if no launcher has set them, and raises ConfigError if some are missing or invalid.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if "RANK" not in environ:
            if "MASTER_ADDR" not in environ or environ.get("SLURM_NTASKS", "1") == "1":
                return None
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        for name in (*names[:2], "MASTER_PORT"):
            if not environ.get(name, "").isdecimal():
                raise ConfigError(
                    f"{name} = {environ.get(name)}: must be an integer; unset {names[0]} to start "
                    "the workers here, or start them with torchrun"
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
    """Context manager that opens the default process group and yields the device of this rank.

    The group uses NCCL for tensors on GPUs and gloo for everything else. Object collectives,
    barriers and background saves use gloo, because with NCCL they would wait for queued GPU work.

    The group is destroyed at the end of the `with` block, or after a PreemptedError, which all
    ranks raise at the same step. After any other error it stays open, because NCCL would wait for
    lost peers, and the caller must use `end_process`. Ranks that torchrun or srun started monitor
    each other, and there such an error is replaced by a ReportedError.

    Raises:
        RendezvousError: The workers do not meet within train.start_timeout_s.
        ConfigError: The devices of the ranks conflict. Raised on all ranks.
    """
    import torch

    device = torch.device("cpu")
    problem = ""
    try:
        device = choose_device(recipe.train.device, rendezvous.local_rank)
    # Raised later on all ranks, by `check_places`. Raised here, it would leave the others waiting.
    except ConfigError as error:
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
            f"rank {rank} of {size}: rendezvous at {rendezvous.init_method} failed within "
            f"{timeout_s:.0f} s: {error}"
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
        ignore_stop_signals()  # Launchers send stop signals when a peer ends.
        raise monitor.report(Failure.of(error, rank, recipe)) from error
    _leave(monitor)


def _meet(
    recipe: Recipe, rendezvous: Rendezvous, device: torch.device, problem: str
) -> list[Place]:
    """Creates the default process group. Returns the places of all ranks."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous as meet

    rank = rendezvous.rank
    size = rendezvous.world_size
    timeout = timedelta(seconds=recipe.train.start_timeout_s)
    # With `size`, the store would not answer until all ranks are connected, and an error could not
    # name the missing ones.
    waited_for = 1 if rendezvous.init_method == "env://" else size
    store, _, _ = next(meet(rendezvous.init_method, rank, waited_for, timeout=timeout))
    store.set_timeout(timeout)
    if rendezvous.attempt:
        store = dist.PrefixStore(rendezvous.attempt, store)
    own = Place.of_this_process(device, problem)
    places = exchange_places(dist.PrefixStore("parallel3d", store), rank, size, own)
    check_places(places, recipe.train.device)
    dist.init_process_group(
        # [Note: device_id] `device_id` is not set. With it, torch creates each later group by
        # splitting the NCCL communicator of all ranks, so even ranks outside the group would have
        # to take part.
        {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device.type],
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return places


def _leave(monitor: PeerMonitor | None) -> None:
    """Stops monitoring on all ranks, then destroys the process group. Otherwise a monitor would
    report a process that has ended as failed."""
    import torch.distributed as dist

    if monitor is not None:
        monitor.close()
        dist.barrier()
    dist.destroy_process_group()


def connect_to_store(prefix: str, timeout_s: float = _STORE_S) -> dist.Store:
    """Connects to the store at MASTER_ADDR and MASTER_PORT. `prefix` precedes all keys. Raises
    OSError if the connection is refused, and RuntimeError if there is no answer."""
    import torch.distributed as dist

    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # This fails immediately if the connection is refused, whereas TCPStore would retry.
    socket.create_connection((host, port), _STORE_S).close()
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(prefix, store)


def was_requeued() -> bool:
    """Returns True if SLURM has restarted this job after a failure or preemption."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def join_attempt(rendezvous: Rendezvous, timeout_s: float) -> Rendezvous:
    """Returns `rendezvous` with the fields `attempt` and `is_restart` set. Collective.

    Raises RendezvousError if not all ranks join within `timeout_s`. Launchers other than torchrun
    create a store for each attempt, so `attempt` stays empty."""
    if not _is_of_torchrun():
        return replace(rendezvous, is_restart=was_requeued())
    die_with_the_parent()  # Otherwise workers would survive a killed torchrun.
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
            f"rank {rank} of {size}: rendezvous failed within {timeout_s:.0f} s: {error}"
        ) from error
    return replace(rendezvous, **invitation)


def record_start() -> None:
    """Records in torchrun's store that the run has started, so that a restart resumes it."""
    if _is_of_torchrun():
        _store_of_torchrun(10.0).set(_STARTED, "")


def _is_of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_of_torchrun(timeout_s: float) -> dist.Store:
    return connect_to_store(f"parallel3d/{os.environ['TORCHELASTIC_RUN_ID']}", timeout_s)


def _invite(store: dist.Store, size: int, timeout_s: float) -> dict[str, Any]:
    """Invites workers to this attempt until all ranks have joined. Returns the fields `attempt` and
    `is_restart`. Raises RuntimeError after `timeout_s`.

    Workers of earlier attempts do not answer. If the store is new but an agent has restarted
    before, an earlier store was lost with its node: this is a restart."""
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

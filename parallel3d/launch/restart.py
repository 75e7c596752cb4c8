"""Tells one attempt of a run from earlier ones.

torchrun restarts a failed run at the same store, which still has the keys of the failed attempt:
addresses at which nobody listens. Each agent counts restarts by itself, so no number in the
environment is new in each attempt and the same on all ranks. So rank 0 draws a name, and gives it
to each rank under a key that only this process knows.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from parallel3d.errors import RendezvousError
from parallel3d.launch.failure import any_ranks
from parallel3d.launch.rendezvous import Rendezvous, connect_to_store

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_S = 0.05
_STARTED = "started"


def was_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    """True if SLURM has started this job again, after a failure or a preemption."""
    return environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def join_attempt(
    rendezvous: Rendezvous, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Returns the rendezvous with the name of this attempt, and whether an earlier attempt has
    started the run. Every rank calls it. Raises RendezvousError if not all ranks come in time.
    Other launchers than torchrun make a store for each attempt."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return replace(rendezvous, is_restart=was_requeued(environ))
    rank, size = rendezvous.rank, rendezvous.world_size
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own_key = f"{uuid4().hex} {restarts}"
    try:
        store = _store_of_torchrun(timeout_s, environ)
        if rank == 0:
            is_new = store.add("attempts", 1) == 1
            started = store.check([_STARTED]) or was_requeued(environ)
            invitation = _invite(store, size, timeout_s, restarts, is_new=is_new, started=started)
        else:
            store.set(f"here/{rank}", own_key)
            invitation = json.loads(store.get(f"invited/{own_key}"))
            store.add(f"{invitation['attempt']}/joined", 1)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {size} did not meet the others in {timeout_s:.0f} s: {error}"
        ) from error
    return replace(rendezvous, **invitation)


def record_start(environ: Mapping[str, str] = os.environ) -> None:
    """Records at torchrun's store that the run has started. A restart then resumes it."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _store_of_torchrun(10.0, environ).set(_STARTED, "")


def _store_of_torchrun(timeout_s: float, environ: Mapping[str, str]) -> dist.Store:
    store = connect_to_store(f"parallel3d/{environ.get('TORCHELASTIC_RUN_ID')}")
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _invite(
    store: dist.Store, size: int, timeout_s: float, restarts: str, *, is_new: bool, started: bool
) -> dict[str, Any]:
    """Invites every process that says it is here, until all ranks have joined. Processes of an
    earlier attempt are invited too, and do not answer. If the store is new but an agent has
    restarted before, the store was lost with its node, and the run had started."""
    attempt, deadline = uuid4().hex, time.monotonic() + timeout_s
    others = [f"here/{rank}" for rank in range(1, size)]
    invited = set[str]()
    while True:
        if not others or store.check(others):
            keys = [key.decode() for key in store.multi_get(others)] if others else []
            counts = [restarts, *(key.split()[1] for key in keys)]
            is_restart = started or (is_new and any(count != "0" for count in counts))
            invitation: dict[str, Any] = {"attempt": attempt, "is_restart": is_restart}
            for key in {*keys} - invited:
                store.set(f"invited/{key}", json.dumps(invitation))
            invited |= {*keys}
        joined = store.add(f"{attempt}/joined", 0)
        if joined == len(others):
            return invitation
        if time.monotonic() > deadline:
            missing = [rank for rank in range(1, size) if not store.check([f"here/{rank}"])]
            who = f"{any_ranks(missing)} did not come" if missing else "some ranks did not answer"
            raise RuntimeError(who)
        time.sleep(_POLL_S)

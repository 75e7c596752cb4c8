"""How the ranks that torchrun has started, perhaps anew, tell this attempt from those before.

torchrun starts a failed run again at the same store, which still has the keys of the attempt that failed: addresses at
which nobody listens any more. Its count of restarts is each agent's own, and a node that joins later counts from 0, so
no number in the environment is the same on all ranks and new in each attempt. So rank 0 makes a name, and each rank
gets it under a key that only this process knows."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from parallel3d.errors import RendezvousError
from parallel3d.launch.failure import any_ranks
from parallel3d.launch.rendezvous import Rendezvous, connect_to_store

if TYPE_CHECKING:
    import torch.distributed as dist

_LOOK_S = 0.05
_BEGUN = "begun"


def was_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    """True if SLURM has started this job again, after a failure or a pre-emption."""
    return environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def join_attempt(rendezvous: Rendezvous, timeout_s: float, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """Returns the rendezvous with the attempt's name and whether this is a restart: an earlier attempt of the same
    launch has begun the run. Every rank calls it. Raises RendezvousError where not all ranks come in
    time. Under another launcher than torchrun every start has a store of its own, and nothing is asked."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return replace(rendezvous, is_restart=was_requeued(environ))
    rank, size = rendezvous.rank, rendezvous.world_size
    try:
        store = _store_of_the_launch(timeout_s, environ)
        told = _invite(store, size, timeout_s, environ) if rank == 0 else _accept(store, rank, environ)
    except RuntimeError as error:
        raise RendezvousError(f"rank {rank} of {size} did not meet the others in {timeout_s:.0f} s: {error}") from error
    return replace(rendezvous, attempt=str(told["attempt"]), is_restart=bool(told["is_restart"]))


def tell_begun(environ: Mapping[str, str] = os.environ) -> None:
    """Notes at the launcher's store that this launch has begun a run in the folder, which a restart then continues."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _store_of_the_launch(10.0, environ).set(_BEGUN, "")


def _restarts(environ: Mapping[str, str]) -> int:
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store_of_the_launch(timeout_s: float, environ: Mapping[str, str]) -> dist.Store:
    store = connect_to_store(f"parallel3d/{environ.get('TORCHELASTIC_RUN_ID')}")
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _accept(store: dist.Store, rank: int, environ: Mapping[str, str]) -> dict[str, object]:
    own = f"{uuid4().hex} {_restarts(environ)}"
    store.set(f"here/{rank}", own)
    told: dict[str, object] = json.loads(store.get(f"invited/{own}"))
    store.add(f"{told['attempt']}/joined", 1)
    return told


def _invite(store: dist.Store, size: int, timeout_s: float, environ: Mapping[str, str]) -> dict[str, object]:
    """Rank 0's part: it invites whoever says to be here, until all have accepted. What a rank of an earlier attempt has
    left is invited, too, and does not answer.

    A store that has seen an earlier attempt knows whether that has begun a run. One that is new was lost with
    its node where any agent has restarted its workers before."""
    attempt, is_new = uuid4().hex, store.add("attempts", 1) == 1
    has_begun = store.check([_BEGUN]) or was_requeued(environ)
    invited, deadline = set[str](), time.monotonic() + timeout_s
    told = {"attempt": attempt, "is_restart": has_begun or (is_new and _restarts(environ) > 0)}
    while (joined := store.add(f"{attempt}/joined", 0)) < size - 1:
        present = [rank for rank in range(1, size) if store.check([f"here/{rank}"])]
        if time.monotonic() > deadline:
            missing = sorted({*range(1, size)} - {*present})
            who = f"{any_ranks(missing)} did not come" if missing else f"{size - 1 - joined} ranks did not answer"
            raise RuntimeError(who)
        found = [each.decode() for each in store.multi_get([f"here/{rank}" for rank in present])] if present else []
        if is_new and len(found) == size - 1:
            told["is_restart"] = told["is_restart"] or any(own.split()[1] != "0" for own in found)
        for own in found if len(found) == size - 1 else ():
            if own not in invited:
                store.set(f"invited/{own}", json.dumps(told))
                invited.add(own)
        time.sleep(_LOOK_S)
    return told

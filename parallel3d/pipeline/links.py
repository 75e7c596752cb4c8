"""Connections between the ranks of a pipeline: shared memory, process groups and failure messages.

Each direction between two ranks has its own process group. A GPU executes the transfers of a group
in the order in which they were issued. With one group for both directions, two ranks that both send
first would deadlock.

NCCL connects two ranks at their first message, and each rank blocks until the other one arrives.
All ranks therefore create their groups in the same order and send a small message through each.

On a single host without GPUs, groups are created only when a message is too large for shared
memory, or at once if shared memory cannot be used.
"""

from __future__ import annotations

import secrets
import select
import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.errors import RankError, ScheduleError
from parallel3d.mesh import Axis
from parallel3d.pipeline.boundary import Crossing, Message
from parallel3d.schedules.schedule import Schedule
from parallel3d.shared_memory.ring import LARGEST_BYTES, Incoming, Outgoing
from parallel3d.shared_memory.segment import PeerLostError, own_folder
from parallel3d.torch_private import default_store, group_of, timeout_of

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.

Way = tuple[int, int]  # (source rank, target rank)


class Links:
    """Connects the ranks of a pipeline. Collective: all ranks create their links together.

    Raises ScheduleError on all ranks if their schedules differ.
    """

    def __init__(self, pp: DeviceMesh | None, schedule: Schedule, device: torch.device) -> None:
        axis = Axis.of(pp)
        self.rank = axis.rank
        self.size = axis.size
        # Global rank of each pipeline rank.
        self._ranks: list[int] = [] if pp is None else pp.mesh.tolist()
        self.incoming: dict[int, Incoming] = {}
        self.outgoing: dict[int, Outgoing] = {}
        # Directions between any two ranks that use shared memory.
        self._shared: set[Way] = set()
        self._pipeline = axis.group
        self._ways = _ways(schedule)
        self.device = device
        # Groups of the directions that begin or end at this rank.
        self._groups: dict[Way, dist.ProcessGroup] = {}
        # Key in the store for the message of the first failure, unique to this pipeline.
        self.name = f"parallel3d/{secrets.token_hex(8)}"
        self._is_closed = False
        self._timeout = timedelta()  # Time limit of a transfer. 0 if there are no other ranks.
        # The "fake" backend of a dry run has no other processes. All messages use the process
        # groups there, as on GPUs.
        if self._pipeline is not None and dist.get_backend(self._pipeline) != "fake":
            self._meet(self._pipeline, schedule)
        if not self._shared.issuperset(self._ways):
            self.open_groups()

    def broadcast(self, value: Any, source: int) -> Any:
        """Broadcasts a value from one pipeline rank. Collective over the pipeline."""
        values = [value]
        dist.broadcast_object_list(values, group=self._pipeline, group_src=source)
        return values[0]

    def shares(self, source: int, target: int, message: Message) -> bool:
        """Returns True if a message is sent through shared memory instead of the backend."""
        return message.nbytes <= LARGEST_BYTES and (source, target) in self._shared

    def _meet(self, pipeline: dist.ProcessGroup, schedule: Schedule) -> None:
        """Compares the schedules and sets up shared memory.

        Each receiver creates its memory and sends the path to all ranks. Then the sender opens it.
        """
        self._timeout = timeout_of(pipeline, self.device)
        with own_folder(self.device.type) as folder:
            mine: dict[int, Path] = {}
            for source, target in self._ways:
                if target == self.rank and folder is not None:
                    path = folder / str(source)
                    # If there is too little shared memory, messages go through the backend.
                    with suppress(OSError):
                        self.incoming[source] = Incoming(path, source)
                        mine[source] = path
            digest = zlib.crc32(f"{schedule.placement}\n{schedule}".encode())
            own = socket.gethostname(), self.name, digest, mine
            offers = [own] * self.size
            dist.all_gather_object(offers, own, group=pipeline)
            hosts, names, digests, memories = zip(*offers, strict=True)
            if len(set(digests)) > 1:
                raise ScheduleError(
                    f"schedule {schedule.name}: must be the same on all ranks of the pipeline"
                )
            self.name = names[0]
            for source, target in self._ways:
                if source in memories[target] and hosts[source] == hosts[target]:
                    self._shared.add((source, target))
                    if source == self.rank:
                        self.outgoing[target] = Outgoing(memories[target][source], target)
            dist.barrier(pipeline)  # All ranks have opened the files, which can now be removed.

    def open_groups(self) -> None:
        """Creates and connects the backend's process groups. Collective over the pipeline.

        All ranks connect the directions in the same order, which excludes deadlocks.
        """
        if self._groups or self._pipeline is None:
            return
        first_message = torch.zeros(1, device=self.device)
        for source, target in self._ways:
            if self.rank not in (source, target):
                continue
            peer = target if self.rank == source else source
            name = f"{self.name} {source} to {target}"
            self._groups[source, target] = group_of(
                [self._ranks[source], self._ranks[target]],
                "pipeline",
                name=name,
                device=self.device,
                timeout=self._timeout or None,
            )
            start = self.isend if self.rank == source else self.irecv
            start(first_message, peer).wait()
        # Without the barrier, a rank that fails now would close its end while its peer is still
        # connecting, and the peer would wait forever.
        dist.barrier(self._pipeline)

    def isend(self, tensor: Tensor, target: int) -> Any:
        """Starts a send through the backend. Raises PeerLostError if the peer is gone."""
        group = self._groups[self.rank, target]
        return _noticing_loss(target, dist.isend, tensor, self._ranks[target], group)

    def irecv(self, tensor: Tensor, source: int) -> Any:
        """Starts a receive through the backend. Raises PeerLostError if the peer is gone."""
        group = self._groups[source, self.rank]
        return _noticing_loss(source, dist.irecv, tensor, self._ranks[source], group)

    def complete(self, work: dist.Work, peer: int) -> None:
        """Waits for a transfer through the backend. Raises PeerLostError on failure or timeout."""
        # On GPUs no timeout is passed, because it would block the host: the stream waits, and
        # NCCL's watchdog applies the timeout. Without an argument, gloo would apply the timeout
        # that its group was created with.
        limits = () if self.device.type == "cuda" else (self._timeout,)
        _noticing_loss(peer, work.wait, *limits)

    def wait(self, link: Incoming) -> int:
        """Waits for the next message of a link and returns its digest.

        Meanwhile it sends queued messages as soon as the receiver has space for them. Raises
        PeerLostError if the peer is gone or the wait times out.
        """
        while (digest := link.poll()) is None:
            self._sleep(link.headers)
        return digest

    def wait_until_sent(self) -> None:
        while any(link.is_waiting for link in self.outgoing.values()):
            self._sleep()

    def _sleep(self, *pipes: int) -> None:
        """Sleeps until one of `pipes` is readable or a queued message can be sent."""
        waiting = [link for link in self.outgoing.values() if link.is_waiting]
        sleeper = select.poll()
        for pipe in (*pipes, *(link.credits for link in waiting)):
            sleeper.register(pipe, select.POLLIN)
        limit_s = self._timeout.total_seconds()
        if not sleeper.poll(limit_s * 1000):
            raise PeerLostError(f"no answer within {limit_s:.0f} s")
        for link in waiting:
            link.flush()

    def begin_run(self, crossings: Sequence[Crossing]) -> None:
        """Prepares a run: opens process groups for large messages and updates the timeout.

        The timeout changes after the first step. Raises RankError if this rank has noticed a
        failure of any rank in an earlier run.
        """
        if self._is_closed:
            raise RankError(
                f"this pipeline has failed: {self.failure_message() or 'see the first error'}"
            )
        if any(crossing.forward.nbytes > LARGEST_BYTES for crossing in crossings):
            self.open_groups()
        if self._pipeline is not None and self._timeout:
            self._timeout = timeout_of(self._pipeline, self.device)

    def fail(self, message: str) -> None:
        """Stores the first failure message and closes all links, so that no rank keeps waiting."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timeout and self.failure_message() is None:
            default_store().set(self.name, message)
        for link in (*self.incoming.values(), *self.outgoing.values()):
            link.close()
        for group in self._groups.values():
            # Destroying an NCCL group would wait for its peers. The launcher ends those processes.
            if dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)

    def failure_message(self) -> str | None:
        """Returns the message of the first rank that failed, or None."""
        if not self._timeout or not default_store().check([self.name]):
            return None
        return str(default_store().get(self.name).decode())


def _noticing_loss(peer: int, call: Callable[..., Any], *args: Any) -> Any:
    """Calls a torch function and converts its RuntimeError into PeerLostError."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise PeerLostError(f"lost the connection to pipeline rank {peer}: {error}") from error


def _ways(schedule: Schedule) -> list[Way]:
    """Returns both directions between the ranks of consecutive stages."""
    pairs = {(one, other) for one, other in pairwise(schedule.placement) if one != other}
    return sorted(pairs | {(target, source) for source, target in pairs})

"""How the ranks of one pipeline reach each other: shared memory, process groups, and the message of
a failure.

Each way from one rank to another has a process group of its own. A GPU works off what a group was
given in order, so with one group for both directions two ranks that each send first would wait for
each other for ever. And NCCL connects two ranks at their first message, for which each of them
stops until the other comes: so all ranks make their groups in one order, and send something small
through each as soon as it is made. On one host without GPUs no group is made until a message is too
large for the shared memory; often none is.
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

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

Way = tuple[int, int]  # source rank, target rank


class Links:
    """Connects the ranks of a pipeline along one placement of stages. All ranks make their links at
    once. Raises ScheduleError on all ranks where their schedules differ."""

    def __init__(self, pp: DeviceMesh | None, schedule: Schedule, device: torch.device) -> None:
        axis = Axis.of(pp)
        self.rank = axis.rank
        self.size = axis.size
        self._ranks: list[int] = [] if pp is None else pp.mesh.tolist()  # of the default group
        self.incoming: dict[int, Incoming] = {}
        self.outgoing: dict[int, Outgoing] = {}
        # the ways of all ranks that have shared memory
        self._shared: set[Way] = set()
        self._pipeline = axis.group
        self._ways = _ways(schedule)
        self.device = device
        self._groups: dict[Way, dist.ProcessGroup] = {}  # of this rank's ways
        # The first rank's on all ranks, and no other pipeline's. The message of the first failure
        # has this key in the store.
        self.name = f"parallel3d/{secrets.token_hex(8)}"
        self._is_closed = False
        self._timeout = timedelta()  # 0 if there are no other processes to wait for
        # In torch's "fake" process group (a dry run) there are no other processes to meet: all
        # messages go through the groups, as on GPUs.
        if self._pipeline is not None and dist.get_backend(self._pipeline) != "fake":
            self._meet(self._pipeline, schedule)
        if not self._shared.issuperset(self._ways):
            self.open_groups()

    def broadcast(self, value: Any, source: int) -> Any:
        """Returns the value that one rank of the pipeline gives. Every rank calls it."""
        values = [value]
        dist.broadcast_object_list(values, group=self._pipeline, group_src=source)
        return values[0]

    def shares(self, source: int, target: int, message: Message) -> bool:
        """Returns whether a message goes through shared memory, not the backend."""
        return message.nbytes <= LARGEST_BYTES and (source, target) in self._shared

    def _meet(self, pipeline: dist.ProcessGroup, schedule: Schedule) -> None:
        """Every target makes the memory of its links and tells all ranks where it is; then both
        ends open it."""
        self._timeout = timeout_of(pipeline, self.device)
        with own_folder(self.device.type) as folder:
            mine: dict[int, Path] = {}
            for source, target in self._ways:
                if target == self.rank and folder is not None:
                    path = folder / str(source)
                    with suppress(OSError):  # without room for it, the backend carries messages
                        self.incoming[source] = Incoming(path, source)
                        mine[source] = path
            digest = zlib.crc32(f"{schedule.placement}\n{schedule}".encode())
            own = socket.gethostname(), self.name, digest, mine
            offers = [own] * self.size
            dist.all_gather_object(offers, own, group=pipeline)
            hosts, names, digests, memories = zip(*offers, strict=True)
            if len(set(digests)) > 1:
                raise ScheduleError(
                    f"schedule {schedule.name}: the ranks of the pipeline do not have the same one"
                )
            self.name = names[0]
            for source, target in self._ways:
                if source in memories[target] and hosts[source] == hosts[target]:
                    self._shared.add((source, target))
                    if source == self.rank:
                        self.outgoing[target] = Outgoing(memories[target][source], target)
            dist.barrier(pipeline)  # all have opened what is now removed

    def open_groups(self) -> None:
        """Makes and connects the backend's groups, when all ranks of the pipeline come to need
        them. Of two ranks that meet for a way, each has already been at its earlier ways: so no
        circle of ranks waits for each other."""
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
        # A rank that failed at once would close its end while another still connects, which then
        # waits for ever.
        dist.barrier(self._pipeline)

    def isend(self, tensor: Tensor, target: int) -> Any:
        """Starts to send a tensor by the backend. Raises PeerLostError if the other end has
        gone."""
        group = self._groups[self.rank, target]
        return _noticing_loss(target, dist.isend, tensor, self._ranks[target], group)

    def irecv(self, tensor: Tensor, source: int) -> Any:
        """Starts to receive a tensor that `source` sends by the backend. Raises PeerLostError if
        the other end has gone."""
        group = self._groups[source, self.rank]
        return _noticing_loss(source, dist.irecv, tensor, self._ranks[source], group)

    def complete(self, work: dist.Work, peer: int) -> None:
        """Waits for a transfer by the backend. Raises PeerLostError if pipeline rank `peer` has
        gone or stays silent."""
        # On a GPU the stream waits, and NCCL's watchdog knows the limit; with one given, the host
        # would stop. gloo's messages know only the first limit of their group.
        limits = () if self.device.type == "cuda" else (self._timeout,)
        _noticing_loss(peer, work.wait, *limits)

    def wait(self, link: Incoming) -> int:
        """Waits for the next message of a link, and returns its digest. Meanwhile messages that
        wait to be sent go out as room comes free. Raises PeerLostError where the other end has gone
        or stays silent."""
        while (digest := link.poll()) is None:
            self._sleep(link.headers)
        return digest

    def wait_until_sent(self) -> None:
        while any(link.is_waiting for link in self.outgoing.values()):
            self._sleep()

    def _sleep(self, *pipes: int) -> None:
        """Sleeps until one of `pipes` can be read, or room comes free for a message that waits to
        be sent."""
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
        """Opens the groups if a message is too large for the shared memory, and looks up how long
        this rank waits for others, which changes after the first step. Raises RankError if an
        earlier run has failed, here or on another rank."""
        if self._is_closed:
            raise RankError(
                f"this pipeline has failed: {self.failure_message() or 'see the first error'}"
            )
        if any(crossing.forward.nbytes > LARGEST_BYTES for crossing in crossings):
            self.open_groups()
        if self._pipeline is not None and self._timeout:
            self._timeout = timeout_of(self._pipeline, self.device)

    def fail(self, message: str) -> None:
        """Tells the other ranks: leaves them a message, then closes everything that they may wait
        for."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timeout and self.failure_message() is None:
            default_store().set(self.name, message)
        for link in (*self.incoming.values(), *self.outgoing.values()):
            link.close()
        for group in self._groups.values():
            # NCCL's would wait for its peers: there the launcher ends them
            if dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)

    def failure_message(self) -> str | None:
        """Returns the message of the first rank that failed, or None where none has failed."""
        if not self._timeout or not default_store().check([self.name]):
            return None
        return str(default_store().get(self.name).decode())


def _noticing_loss(peer: int, call: Callable[..., Any], *args: Any) -> Any:
    """Calls torch. Raises PeerLostError if that fails."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise PeerLostError(f"nothing more from pipeline rank {peer}: {error}") from error


def _ways(schedule: Schedule) -> list[Way]:
    """Returns both ways between the ranks of each two stages in a row."""
    pairs = {(one, other) for one, other in pairwise(schedule.placement) if one != other}
    return sorted(pairs | {(target, source) for source, target in pairs})

"""How the ranks of one pipeline reach each other: shared memory, process groups, and the message of a failure.

One process group carries what goes to a higher rank and another what goes to a lower rank, because a GPU's group works
off its queue in order: with a single queue two ranks that each send first would wait for each other for ever. The
groups are made when the first message needs them; on one host without GPUs often none does.
"""

from __future__ import annotations

import select
import socket
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from parallel3d.errors import RankError, ScheduleError
from parallel3d.host_memory.ring import Header, Incoming, Outgoing, PeerLostError, reserve
from parallel3d.host_memory.segment import can_share, own_folder
from parallel3d.schedules.schedule import Schedule
from parallel3d.torch_private import default_store, timeout_ms

Way = tuple[int, int]  # source rank, target rank


class Links:
    """Connects the ranks of a pipeline along one placement of stages. All ranks make their links at once. Raises
    ScheduleError on all ranks where their schedules differ."""

    def __init__(self, pp: DeviceMesh, schedule: Schedule, device: torch.device) -> None:
        self.rank, self.size = (pp.get_local_rank(), pp.size()) if pp.size() > 1 else (0, 1)
        self.incoming: dict[int, Incoming] = {}
        self.outgoing: dict[int, Outgoing] = {}
        self.shared: frozenset[Way] = frozenset()  # the ways of all ranks that go through shared memory
        self._pipeline = pp.get_group() if self.size > 1 else None
        self._groups: dict[bool, dist.ProcessGroup] = {}  # True: the group that carries what goes to a higher rank
        self._is_closed = False
        self._failure_key = ""  # where the ranks leave the message of the first failure; "" where there are no others
        self._timeout_ms = 0.0
        if self.size > 1:
            self._meet(pp.get_group(), schedule, device)

    def _meet(self, pipeline: dist.ProcessGroup, schedule: Schedule, device: torch.device) -> None:
        """Every target makes the memory of its links and tells all ranks where it is; then both ends open it."""
        self._timeout_ms = timeout_ms(pipeline, device)
        with own_folder(device.type) as folder:
            mine: dict[Way, Path] = {}
            for source, target in [way for way in _ways(schedule) if way[1] == self.rank and can_share(device.type)]:
                with suppress(OSError):  # where there is no room, the backend carries this way's messages
                    path = folder / f"{source}-{target}"
                    reserve(path)
                    mine[source, target] = path
            incoming = {source: Incoming(path, source) for (source, _), path in mine.items()}
            digest = zlib.crc32(f"{schedule.placement}\n{schedule}".encode())
            own = socket.gethostname(), folder, digest, mine
            offers = [own] * self.size
            dist.all_gather_object(offers, own, group=pipeline)
            hosts, folders, digests, links = zip(*offers, strict=True)
            if len(set(digests)) > 1:
                raise ScheduleError(f"schedule {schedule.name}: the ranks of the pipeline do not have the same one")
            self._failure_key = f"parallel3d/{hosts[0]}{folders[0]}"
            for source, target in _ways(schedule):
                if (source, target) in links[target] and hosts[source] == hosts[target]:
                    self.shared |= {(source, target)}
                    if source == self.rank:
                        self.outgoing[target] = Outgoing(links[target][source, target], target)
            self.incoming = {source: link for source, link in incoming.items() if (source, self.rank) in self.shared}
            dist.barrier(pipeline)  # all have opened what is now removed

    def open_groups(self) -> None:
        """Makes the backend's groups, when all ranks of the pipeline come to need them."""
        if not self._groups:
            for ascending in (True, False):
                assert self._pipeline is not None
                ranks = dist.get_process_group_ranks(self._pipeline)
                group = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"pipeline_{ascending}")
                assert isinstance(group, dist.ProcessGroup)
                self._groups[ascending] = group
            # A rank that failed at once would close its end while another still connects, which then waits for ever.
            dist.barrier(self._pipeline)

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[source < target]

    def wait(self, link: Incoming) -> Header:
        """Waits for the next header of a link. Meanwhile messages that wait to be sent go out as room comes free.
        Raises PeerLostError where the other end has gone or stays silent."""
        while (header := link.poll()) is None:
            self._sleep([link.headers])
        return header

    def wait_until_sent(self) -> None:
        for link in self.outgoing.values():
            while link.is_waiting:
                self._sleep([])

    def _sleep(self, pipes: list[int]) -> None:
        """Sleeps until one of `pipes` can be read, or room comes free for a message that waits to be sent."""
        sleeper = select.poll()
        for pipe in pipes:
            sleeper.register(pipe, select.POLLIN)
        waiting = [link for link in self.outgoing.values() if link.is_waiting]
        for link in waiting:
            sleeper.register(link.credits, select.POLLIN)
        if not sleeper.poll(self._timeout_ms):
            raise PeerLostError(f"no answer within {self._timeout_ms / 1000:.0f} s")
        for link in waiting:
            link.flush()

    def check_open(self) -> None:
        """Raises RankError where an earlier run has failed, here or on another rank."""
        if self._is_closed:
            raise RankError(f"this pipeline has failed: {self.failure_message() or 'see the first error'}")

    def fail(self, message: str) -> None:
        """Tells the other ranks: leaves them a message, then closes everything that they may wait for."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._failure_key and self.failure_message() is None:
            default_store().set(self._failure_key, message)
        for link in (*self.incoming.values(), *self.outgoing.values()):
            link.close()
        for group in self._groups.values():
            if dist.get_backend(group) == "gloo":  # NCCL's would wait for its peers: there the launcher ends them
                dist.destroy_process_group(group)

    def failure_message(self) -> str | None:
        """Returns the message of the first rank that failed, or None where none has failed."""
        if not self._failure_key or not default_store().check([self._failure_key]):
            return None
        return str(default_store().get(self._failure_key).decode())


Connect = Callable[[DeviceMesh, Schedule, torch.device], Links]


class OfflineLinks(Links):
    """Stands in for the links of a rank whose pipeline has no other processes (a dry run in torch's "fake" process
    group). All messages go through the groups, as on GPUs, and a failure is told to nobody."""

    def _meet(self, pipeline: dist.ProcessGroup, schedule: Schedule, device: torch.device) -> None:
        pass


def _ways(schedule: Schedule) -> list[Way]:
    """Returns both ways between the ranks of each two stages in a row."""
    stages = schedule.placement
    pairs = {pair for pair in zip(stages[:-1], stages[1:], strict=True) if pair[0] != pair[1]}
    return sorted(pairs | {(target, source) for source, target in pairs})

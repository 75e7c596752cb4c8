"""Exchange of small tensors between the ranks of a process group on one host: every rank reads what
every rank wrote.

On CPUs a gloo collective costs about a millisecond of processor time however small it is, and ten
where a host has more ranks than cores (docs/benchmarks.md): more than a small layer's whole work.
Here a rank writes its tensor into a slot that the others can read, tells each of them so by one
byte through a pipe, and reads theirs.

[Note: slots] A slot is written again SLOTS exchanges later. A rank has at most IN_FLIGHT exchanges
open, so when it opens number k + SLOTS it has finished k + IN_FLIGHT, for which it has heard from
every rank that opened that one, and so had finished k: nobody still reads the slot.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.shared_memory.segment import (
    PeerLostError,
    Segment,
    own_folder,
    read_pipe,
    reserve,
)
from parallel3d.torch_private import timeout_of

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

SLOT_BYTES = 2**20
SLOTS = 4
IN_FLIGHT = 2

# What a group's ranks have agreed on lives as long as the group, whose class takes no attributes.
# Every layer asks for the exchange of its group, and all ranks open it once.
_EXCHANGES: WeakKeyDictionary[dist.ProcessGroup, SharedExchange | None] = WeakKeyDictionary()


def exchange_of(group: dist.ProcessGroup) -> SharedExchange | None:
    """Returns the exchange of a group, which all of its ranks make at once when they first ask for
    it. All ranks get None where they are on several hosts, where a host has no memory to share, or
    where the group has no other processes (torch's "fake" backend)."""
    if group not in _EXCHANGES:
        _EXCHANGES[group] = None if dist.get_backend(group) == "fake" else _open_exchange(group)
    return _EXCHANGES[group]


def _open_exchange(group: dist.ProcessGroup) -> SharedExchange | None:
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    exchange: SharedExchange | None = None
    with own_folder("cpu") as folder:
        if folder is not None:
            try:
                reserve(folder, SLOTS * SLOT_BYTES, map(str, range(size)))
            except OSError:
                folder = None  # all ranks then agree on no exchange
        offer = (socket.gethostname(), folder)
        offers = [offer] * size
        dist.all_gather_object(offers, offer, group=group)
        folders = [path for host, path in offers if path and host == offers[0][0]]
        if len(folders) == size:
            exchange = SharedExchange(folders, rank, ref(group))
        dist.barrier(group)  # all have opened what is now removed
    return exchange


class SharedExchange:
    """The slots of all ranks of a group, and the pipes between them. Every rank opens the same
    exchanges in the same order. `folders[r]` is the segment of rank r."""

    def __init__(self, folders: list[Path], rank: int, group: ref[dist.ProcessGroup]) -> None:
        self._segments = [Segment(folder) for folder in folders]
        self._rank = rank
        # Every rank opens the ends that it reads first, because a writer waits for its reader. Both
        # ends are open, so that the end of a process closes its own: its peers then read nothing,
        # and know.
        own = self._segments[rank]
        mode = os.O_RDONLY | os.O_NONBLOCK
        others = [other for other in range(len(folders)) if other != rank]
        self._hears = {other: own.open_pipe(str(other), mode) for other in others}
        self._tells = [self._segments[each].open_pipe(str(rank), os.O_WRONLY) for each in others]
        self._views: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}
        self._group = group  # whose time-out may change
        self._opened = 0
        self._finished = 0

    def start(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Publishes `x`, contiguous and at most SLOT_BYTES. The returned function waits for the
        others and gives what every rank has published, in the order of ranks, as memory that stays
        as it is until two exchanges later."""
        assert self._opened - self._finished < IN_FLIGHT, "no slot is free"
        slot = self._opened % SLOTS
        key = (slot, x.dtype, x.shape)
        if key not in self._views:
            self._views[key] = [segment.view(slot * SLOT_BYTES, x) for segment in self._segments]
        views = self._views[key]
        self._opened += 1
        views[self._rank].copy_(x)
        for pipe in self._tells:
            os.write(pipe, b"\0")

        def finish() -> list[Tensor]:
            for rank, pipe in self._hears.items():
                self._hear(rank, pipe)
            self._finished += 1
            return views

        return finish

    def _hear(self, rank: int, pipe: int) -> None:
        """Waits for the next byte of a rank. Raises PeerLostError if the rank is gone or does not
        answer in time."""
        peer = f"rank {rank} of the group"
        while not read_pipe(pipe, 1, peer):
            group = self._group()
            sleeper = select.poll()
            sleeper.register(pipe, select.POLLIN)
            assert group is not None, "a layer waits for its own group"
            limit = timeout_of(group, torch.device("cpu"))
            if not sleeper.poll(limit.total_seconds() * 1000):
                raise PeerLostError(f"{peer} did not answer in time")

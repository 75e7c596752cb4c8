"""Exchange of small tensors between ranks of one host through shared memory.

A gloo collective costs about a millisecond of CPU time regardless of its size, and ten if a host
has more ranks than cores (docs/benchmarks.md). That exceeds the work of a small layer. Here a rank
writes its tensor into a slot that the other ranks can read, and notifies each by one byte through a
pipe.

[Note: slots] Exchange k and exchange k + SLOTS use the same slot, with SLOTS = 2 IN_FLIGHT. A rank
has at most IN_FLIGHT unfinished exchanges. When it starts k + SLOTS, it has therefore finished
k + IN_FLIGHT, which means that every rank has started k + IN_FLIGHT. Each of them had finished k
before that, so no rank still reads the slot.
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

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.

SLOT_BYTES = 2**20
SLOTS = 4
IN_FLIGHT = 2

# One exchange per process group, shared by all layers. It lives as long as its group. A weak dict,
# because ProcessGroup accepts no attributes.
_EXCHANGES: WeakKeyDictionary[dist.ProcessGroup, SharedExchange | None] = WeakKeyDictionary()


def exchange_of(group: dist.ProcessGroup) -> SharedExchange | None:
    """Returns the exchange of a group, or None if its ranks cannot share memory.

    The first call is collective over the group. The result is None on all ranks if they are on
    several hosts, if any of them lacks shared memory, or for torch's "fake" backend.
    """
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
                folder = None  # All ranks then agree on None.
        offer = (socket.gethostname(), folder)
        offers = [offer] * size
        dist.all_gather_object(offers, offer, group=group)
        folders = [path for host, path in offers if path and host == offers[0][0]]
        if len(folders) == size:
            exchange = SharedExchange(folders, rank, ref(group))
        dist.barrier(group)  # Wait until all ranks have opened the files, which are removed next.
    return exchange


class SharedExchange:
    """The slots of all ranks of a group, and the pipes between them.

    All ranks must start the same exchanges in the same order. `folders[r]` has rank r's segment.
    """

    def __init__(self, folders: list[Path], rank: int, group: ref[dist.ProcessGroup]) -> None:
        self._segments = [Segment(folder) for folder in folders]
        self._rank = rank
        # Open the read ends first, because opening a write end waits for a reader. A pipe whose
        # writer ended returns end-of-file, so peers notice a dead process.
        own = self._segments[rank]
        mode = os.O_RDONLY | os.O_NONBLOCK
        others = [other for other in range(len(folders)) if other != rank]
        self._hears = {other: own.open_pipe(str(other), mode) for other in others}
        self._tells = [self._segments[each].open_pipe(str(rank), os.O_WRONLY) for each in others]
        self._views: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}
        self._group = group  # For its timeout, which may change later.
        self._opened = 0
        self._finished = 0

    def start(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Writes `x` to this rank's slot and notifies the other ranks. `x` must be contiguous and
        have at most SLOT_BYTES.

        Returns a function that waits for all ranks and returns their tensors in rank order. They
        stay valid until the second `start` after this one. At most IN_FLIGHT exchanges can be open.
        """
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
        """Waits for the next byte from a rank. Raises PeerLostError if it died or timed out."""
        peer = f"rank {rank} of the group"
        while not read_pipe(pipe, 1, peer):
            group = self._group()
            sleeper = select.poll()
            sleeper.register(pipe, select.POLLIN)
            assert group is not None, "the group outlives its layers"
            limit = timeout_of(group, torch.device("cpu"))
            if not sleeper.poll(limit.total_seconds() * 1000):
                raise PeerLostError(f"{peer} did not answer in time")

"""Exchange of small tensors between processes of one host through memory that they share.

On CPUs a gloo collective costs about a millisecond of processor time however small it is, and ten where a host has
more ranks than cores (docs/performance.md): more than a small layer's whole work. Here a rank writes its tensor into a
slot that the others can read, tells each of them so by one byte through a pipe, and reads theirs.

[Note: slots] A slot is written again SLOTS exchanges later. A rank has at most IN_FLIGHT exchanges open, so when it
opens number k + SLOTS it has finished k + IN_FLIGHT, for which it has heard from every rank that opened that one, and
so had finished k: nobody still reads the slot.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.torch_private import timeout_ms

SLOT_BYTES = 2**20
SLOTS = 4
IN_FLIGHT = 2
_MEMORY_FOLDER = Path("/dev/shm")


# What a group's ranks have agreed on lives as long as the group: asked for by every layer, made once.
_EXCHANGES: WeakKeyDictionary[dist.ProcessGroup, SharedExchange | None] = WeakKeyDictionary()


def shared_exchange(group: dist.ProcessGroup) -> SharedExchange | None:
    """The exchange of a group, made when first asked for, by all of its ranks at once. None where they are on several
    hosts, where there is no memory to share, or where the group has no other processes (torch's "fake" backend); all
    ranks then have None."""
    if group not in _EXCHANGES:
        _EXCHANGES[group] = _open_exchange(group)
    return _EXCHANGES[group]


def _open_exchange(group: dist.ProcessGroup) -> SharedExchange | None:
    if dist.get_backend(group) == "fake":
        return None
    size = dist.get_world_size(group)
    hosts: list[str | None] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname() if _MEMORY_FOLDER.is_dir() else None, group=group)
    if None in hosts or len(set(hosts)) > 1:
        return None
    folder = [tempfile.mkdtemp(prefix="parallel3d-", dir=_MEMORY_FOLDER) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    assert folder[0] is not None
    try:
        return SharedExchange(group, Path(folder[0])) if _reserve(group, Path(folder[0])) else None
    finally:
        dist.barrier(group)
        if dist.get_rank(group) == 0:
            shutil.rmtree(folder[0])  # what is open stays; nothing is left behind, however the processes end


class SharedExchange:
    """Slots and pipes between the ranks of a group. Every rank opens the same exchanges in the same order."""

    def __init__(self, group: dist.ProcessGroup, folder: Path) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._memory = [
            torch.from_file(str(folder / f"{rank}"), shared=True, size=SLOTS * SLOT_BYTES, dtype=torch.uint8)
            for rank in range(self._size)
        ]
        # Both ends are opened so that the end of a process closes its own: its peers then read nothing, and know.
        self._hears = {rank: os.open(folder / f"{rank}-{self._rank}", os.O_RDONLY | os.O_NONBLOCK) for rank in others}
        dist.barrier(group)
        self._tells = {rank: os.open(folder / f"{self._rank}-{rank}", os.O_WRONLY) for rank in others}
        dist.barrier(group)
        finalize(self, _close, [*self._hears.values(), *self._tells.values()])
        self._views: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}
        self._timeout_ms = timeout_ms(group, torch.device("cpu"))
        self._opened, self._finished = 0, 0

    def start(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Publishes `x`, contiguous and at most SLOT_BYTES. The returned function waits for the others and gives what
        every rank has published, in the order of ranks, as memory that stays as it is until two exchanges later."""
        assert self._opened - self._finished < IN_FLIGHT, "more exchanges open than there are slots for"
        views = self._slots(self._opened % SLOTS, x)
        self._opened += 1
        views[self._rank].copy_(x)
        for pipe in self._tells.values():
            os.write(pipe, b"\0")

        def finish() -> list[Tensor]:
            for rank, pipe in self._hears.items():
                self._hear(rank, pipe)
            self._finished += 1
            return views

        return finish

    def _slots(self, slot: int, like: Tensor) -> list[Tensor]:
        """Every rank's slot as a tensor like `like`."""
        key = (slot, like.dtype, like.shape)
        if key not in self._views:
            start, length = slot * SLOT_BYTES, like.nbytes
            self._views[key] = [m[start : start + length].view(like.dtype).view(like.shape) for m in self._memory]
        return self._views[key]

    def _hear(self, rank: int, pipe: int) -> None:
        """Waits for the next byte of a rank. Raises ConnectionError where it is gone, TimeoutError where it is mute."""
        try:
            heard = os.read(pipe, 1)
        except BlockingIOError:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            if not poll.poll(self._timeout_ms):
                raise TimeoutError(f"rank {rank} of the group did not answer in time") from None
            heard = os.read(pipe, 1)
        if not heard:
            raise ConnectionError(f"connection closed by rank {rank} of the group")


def _close(pipes: list[int]) -> None:
    for pipe in pipes:
        os.close(pipe)


def _reserve(group: dist.ProcessGroup, folder: Path) -> bool:
    """Makes this rank's memory and pipes. False, on all ranks, where one of them found no room: memory that is only
    promised would end the process when it is first written."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    try:
        with (folder / f"{rank}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SLOTS * SLOT_BYTES)
        for other in range(size):
            if other != rank:
                os.mkfifo(folder / f"{other}-{rank}")
        made = True
    except OSError:
        made = False
    answers: list[bool] = [False] * size
    dist.all_gather_object(answers, made, group=group)
    return all(answers)

"""One-way links between two processes of a host, through memory that they share.

A send over gloo costs about 60 microseconds of processor time however small it is (docs/performance.md), more than a
small stage's own work. Here the sender copies into a ring of shared memory and writes a header of a few bytes into a
pipe; the receiver, which sleeps on that pipe, copies out and returns a byte, which frees the place in the ring.

Nothing blocks a sender: what finds no room waits in its own queue, and goes out whenever the rank sends, receives or
waits. A pipe whose other end was closed reads as such, so that the end of a process wakes everyone who waits for it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.pipeline.boundary import ALIGNMENT, Message
from parallel3d.schedules.schedule import Action, Kind

RING_BYTES = 4 * 2**20
LARGEST_BYTES = RING_BYTES // 4  # of a message; a larger one takes the backend, which copies while the rank computes
_MOST_IN_RING = 1024  # messages: their headers fit into a pipe

_HEADER = struct.Struct("<HcIIII")
_MEMORY, _HEADERS, _CREDITS = "memory", "headers", "credits"


class Header(NamedTuple):
    """What is said of a message: the action that takes it, where it lies, and what its sender has declared of it."""

    taker: Action
    start: int
    nbytes: int
    digest: int


class PeerLostError(ConnectionError):
    """Another rank of the pipeline has closed its links, or ended."""


def prepare(folder: Path) -> None:
    """Makes a link's memory and pipes. Raises OSError where there is no room: memory that is only promised would end
    the process when it is first written."""
    folder.mkdir()
    with (folder / _MEMORY).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RING_BYTES)
    os.mkfifo(folder / _HEADERS)
    os.mkfifo(folder / _CREDITS)


class _End:
    """The memory, and the pipes beside it."""

    def __init__(self, folder: Path, peer: int) -> None:
        self.peer = peer
        with (folder / _MEMORY).open("r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), RING_BYTES), dtype=torch.uint8)
        self._pipes: list[int] = []

    def _open(self, path: Path, mode: int) -> int:
        pipe = os.open(path, mode)
        self._pipes.append(pipe)
        return pipe

    def _views(self, start: int, message: Message) -> list[Tensor]:
        return [
            self._memory[start + offset : start + offset + spec.nbytes].view(spec.dtype).view(spec.shape)  # type: ignore[arg-type]
            for spec, offset in zip(message.specs, message.offsets, strict=True)
        ]

    def close(self) -> None:
        """Tells the other end, which then reads nothing."""
        while self._pipes:
            os.close(self._pipes.pop())

    def __del__(self) -> None:
        self.close()


class Outgoing(_End):
    """The sender's end, opened when the receiver has opened its own: a pipe with no reader cannot be."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder, peer)
        self._headers = self._open(folder / _HEADERS, os.O_WRONLY)
        self.credits = self._open(folder / _CREDITS, os.O_RDONLY | os.O_NONBLOCK)
        self._queue: deque[tuple[Action, Message, Sequence[Tensor]]] = deque()
        self._in_ring: deque[int] = deque()  # bytes that each message takes, in order
        self._next = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._queue)

    def send(self, taker: Action, message: Message, tensors: Sequence[Tensor]) -> None:
        self._queue.append((taker, message, tensors))
        self.flush()

    def flush(self) -> None:
        """Sends what there is room for. Raises PeerLostError."""
        while self._queue:
            taker, message, tensors = self._queue[0]
            start = self._reserve(_aligned(message.nbytes))
            if start is None:
                return
            self._queue.popleft()
            for view, tensor in zip(self._views(start, message), tensors, strict=True):
                view.copy_(tensor)
            stage, kind, microbatch = taker
            header = _HEADER.pack(stage, kind.encode(), microbatch, start, message.nbytes, message.digest)
            try:
                os.write(self._headers, header)
            except BrokenPipeError:
                raise PeerLostError(f"pipeline rank {self.peer} has gone") from None

    def _reserve(self, size: int) -> int | None:
        """Where a message is to lie, in one piece: the end of the ring may stay empty. None: there is no room yet."""
        self._collect_credits()
        if not self._in_ring:
            self._next = 0  # the same memory again and again, which the caches then hold
        start, taken = (self._next, size) if self._next + size <= RING_BYTES else (0, size + RING_BYTES - self._next)
        if sum(self._in_ring) + taken > RING_BYTES or len(self._in_ring) >= _MOST_IN_RING:
            return None
        self._in_ring.append(taken)
        self._next = start + size
        return start

    def _collect_credits(self) -> None:
        if not self._in_ring:
            return
        try:
            returned = os.read(self.credits, _MOST_IN_RING)
        except BlockingIOError:
            return
        if not returned:
            raise PeerLostError(f"pipeline rank {self.peer} has gone")
        for _ in returned:
            self._in_ring.popleft()


class Incoming(_End):
    """The receiver's end."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder, peer)
        self.headers = self._open(folder / _HEADERS, os.O_RDONLY | os.O_NONBLOCK)
        self._credits = self._open(folder / _CREDITS, os.O_RDWR)  # as a writer alone it would wait for the sender
        self._unread = b""

    def poll(self) -> Header | None:
        """The next message's header, which then is to be followed by `read`; None where there is none yet. Raises
        PeerLostError."""
        if not self._unread:
            try:
                self._unread = os.read(self.headers, _HEADER.size * _MOST_IN_RING)
            except BlockingIOError:
                return None
            if not self._unread:
                raise PeerLostError(f"pipeline rank {self.peer} has gone")
        stage, kind, microbatch, start, nbytes, digest = _HEADER.unpack_from(self._unread)
        self._unread = self._unread[_HEADER.size :]
        return Header(Action(stage, Kind(kind.decode()), microbatch), start, nbytes, digest)

    def read(self, header: Header, message: Message, into: Sequence[Tensor]) -> None:
        """Copies the message out of the ring and gives its place back."""
        for view, tensor in zip(self._views(header.start, message), into, strict=True):
            tensor.copy_(view)
        os.write(self._credits, b"\0")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

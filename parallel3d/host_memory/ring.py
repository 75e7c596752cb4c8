"""One-way links between two processes of a host, through a ring in memory that they share.

A send over gloo costs about 60 microseconds of processor time however small it is
(docs/performance.md), more than a small stage's own work. Here the sender copies into the ring and
writes a header of a few bytes into a pipe; the receiver, which sleeps on that pipe, copies out and
returns a byte, which frees the place in the ring.

Nothing blocks a sender: a message that finds no room waits in the sender's own queue, and goes out
whenever the rank sends, receives or waits.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from parallel3d.host_memory import segment
from parallel3d.host_memory.segment import Segment

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

RING_BYTES = 4 * 2**20
# the most of a message; a larger one takes the backend, which copies meanwhile
LARGEST_BYTES = RING_BYTES // 4
ALIGNMENT = 64  # bytes, of each tensor in a message
_MOST_IN_RING = 1024  # messages
_HEADER = struct.Struct("<16sII")
_HEADER_IN_PIPE_BYTES = 32  # no header lies in two of a pipe's pages
_HEADERS, _CREDITS = "headers", "credits"


class PeerLostError(ConnectionError):
    """The process at the other end of a link has closed it, has ended, or does not answer in
    time."""


class Header(NamedTuple):
    """What the sender says of a message: a tag of at most 16 bytes, and where the message lies in
    the ring."""

    tag: bytes
    start: int
    nbytes: int


def reserve(folder: Path) -> None:
    """Makes the ring and the pipes of a link. Raises OSError where there is no room for them."""
    segment.reserve(folder, RING_BYTES, (_HEADERS, _CREDITS))


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Returns where each tensor of a message starts, in bytes, and the bytes of the message."""
    starts, nbytes = [], 0
    for tensor in tensors:
        starts.append(_aligned(nbytes))
        nbytes = starts[-1] + tensor.nbytes
    return starts, nbytes


class Outgoing(Segment):
    """The sender's end of a link to rank `peer`. The receiver opens its end first, because a pipe
    for writing needs a reader."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder)
        self.peer = peer
        self._headers = self.open_pipe(_HEADERS, os.O_WRONLY)
        # A user with many pipes gets small ones, and a write into a full pipe would block.
        room = fcntl.fcntl(self._headers, fcntl.F_GETPIPE_SZ) // _HEADER_IN_PIPE_BYTES
        self._most_in_ring = min(_MOST_IN_RING, room)
        self.credits = self.open_pipe(_CREDITS, os.O_RDONLY | os.O_NONBLOCK)
        self._queue: deque[tuple[bytes, Sequence[Tensor]]] = deque()
        self._in_ring: deque[int] = deque()  # bytes that each message takes, in order
        self._next = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a message waits for room in the ring."""
        return bool(self._queue)

    def send(self, tag: bytes, tensors: Sequence[Tensor]) -> None:
        """Sends a message of at most LARGEST_BYTES, or queues it. Raises PeerLostError where the
        receiver is gone."""
        self._queue.append((tag, tensors))
        self.flush()

    def flush(self) -> None:
        """Sends the messages that there is room for. Raises PeerLostError where the receiver is
        gone."""
        while self._queue:
            tag, tensors = self._queue[0]
            starts, nbytes = layout(tensors)
            first = self._place(_aligned(nbytes))
            if first is None:
                return
            self._queue.popleft()
            for start, tensor in zip(starts, tensors, strict=True):
                self.view(first + start, tensor).copy_(tensor)
            try:
                os.write(self._headers, _HEADER.pack(tag, first, nbytes))
            except BrokenPipeError:
                raise PeerLostError(f"pipeline rank {self.peer} has gone") from None

    def _place(self, size: int) -> int | None:
        """Returns where a message is to lie, in one piece, so that the end of the ring may stay
        empty. None means that there is no room yet."""
        if self._in_ring:
            with suppress(BlockingIOError):
                returned = os.read(self.credits, _MOST_IN_RING)
                if not returned:
                    raise PeerLostError(f"pipeline rank {self.peer} has gone")
                for _ in returned:
                    self._in_ring.popleft()
        if not self._in_ring:
            self._next = 0  # the same memory again and again, which the caches then hold
        start, taken = (
            (self._next, size)
            if self._next + size <= RING_BYTES
            else (0, size + RING_BYTES - self._next)
        )
        if sum(self._in_ring) + taken > RING_BYTES or len(self._in_ring) >= self._most_in_ring:
            return None
        self._in_ring.append(taken)
        self._next = start + size
        return start


class Incoming(Segment):
    """The receiver's end of a link from rank `peer`."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder)
        self.peer = peer
        self.headers = self.open_pipe(_HEADERS, os.O_RDONLY | os.O_NONBLOCK)
        # a pipe for writing alone would wait for the sender
        self._credits = self.open_pipe(_CREDITS, os.O_RDWR)
        self._unread = b""

    def poll(self) -> Header | None:
        """Returns the next message's header, after which `read` takes the message; None where
        nothing has come yet. Raises PeerLostError where the sender is gone."""
        if not self._unread:
            try:
                self._unread = os.read(self.headers, _HEADER.size * _MOST_IN_RING)
            except BlockingIOError:
                return None
            if not self._unread:
                raise PeerLostError(f"pipeline rank {self.peer} has gone")
        header = Header(*_HEADER.unpack_from(self._unread))
        self._unread = self._unread[_HEADER.size :]
        return header

    def read(self, header: Header, into: Sequence[Tensor]) -> None:
        """Copies the message into tensors of the shapes that were sent, and gives its place in the
        ring back."""
        for start, tensor in zip(layout(into)[0], into, strict=True):
            tensor.copy_(self.view(header.start + start, tensor))
        os.write(self._credits, b"\0")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

"""One-way links between two processes of a host, through a ring in memory that they share.

A send over gloo costs about 60 microseconds of processor time however small it is
(docs/benchmarks.md), more than a small stage's own work. Here the sender copies into the ring and
writes a digest of the message's shapes, and its place, into a pipe; the receiver, which sleeps on
that pipe, copies out and returns a byte, which frees the place in the ring.

Nothing blocks a sender: a message that finds no room waits in the sender's own queue, and goes out
whenever the rank sends, receives or waits.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from parallel3d.shared_memory.segment import PeerLostError, Segment, read_pipe, reserve

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

RING_BYTES = 4 * 2**20
# the most of a message; a larger one takes the backend, which copies meanwhile
LARGEST_BYTES = RING_BYTES // 4
ALIGNMENT = 64  # bytes, of each tensor in a message
_HEADER = struct.Struct("<II")  # a digest, and where the message starts in the ring
# messages; their headers fill one page, which is the smallest pipe, so that no write blocks
_MOST_IN_RING = 4096 // _HEADER.size
_HEADERS = "headers"
_CREDITS = "credits"


class _RingEnd(Segment):
    """One end of a link. `peer` is the rank of the other end."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder)
        self._peer = f"pipeline rank {peer}"

    def _places(self, start: int, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor of a message with its place in the ring."""
        for tensor in tensors:
            yield tensor, self.view(start, tensor)
            start += _aligned(tensor)


class Outgoing(_RingEnd):
    """The sender's end of a link. The receiver opens its end first, because a pipe for writing
    needs a reader."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder, peer)
        self._headers = self.open_pipe(_HEADERS, os.O_WRONLY)
        self.credits = self.open_pipe(_CREDITS, os.O_RDONLY | os.O_NONBLOCK)
        self._queue: deque[tuple[int, Sequence[Tensor]]] = deque()
        self._in_ring: deque[int] = deque()  # bytes that each message takes, in order
        self._next = 0  # where the next message is to lie

    @property
    def is_waiting(self) -> bool:
        """Whether a message waits for room in the ring."""
        return bool(self._queue)

    def send(self, digest: int, tensors: Sequence[Tensor]) -> None:
        """Sends a message of at most LARGEST_BYTES, or queues it. Raises PeerLostError where the
        receiver is gone."""
        self._queue.append((digest, tensors))
        self.flush()

    def flush(self) -> None:
        """Sends the messages that there is room for. Raises PeerLostError where the receiver is
        gone."""
        if self._in_ring:
            for _ in read_pipe(self.credits, _MOST_IN_RING, self._peer):
                self._in_ring.popleft()
        while self._queue and len(self._in_ring) < _MOST_IN_RING:
            digest, tensors = self._queue[0]
            size = sum(map(_aligned, tensors))
            if not self._in_ring:
                self._next = 0  # the same memory again and again, which the caches then hold
            start = self._next
            taken = size
            if start + size > RING_BYTES:  # a message lies in one piece
                start, taken = 0, size + RING_BYTES - start
            if sum(self._in_ring) + taken > RING_BYTES:
                return
            self._queue.popleft()
            for tensor, place in self._places(start, tensors):
                place.copy_(tensor)
            self._in_ring.append(taken)
            self._next = start + size
            try:
                os.write(self._headers, _HEADER.pack(digest, start))
            except BrokenPipeError:
                raise PeerLostError(f"{self._peer} has gone") from None


class Incoming(_RingEnd):
    """The receiver's end of a link. It makes the link in a new folder. Raises OSError if there is
    no room for it."""

    def __init__(self, folder: Path, peer: int) -> None:
        folder.mkdir()
        reserve(folder, RING_BYTES, (_HEADERS, _CREDITS))
        super().__init__(folder, peer)
        self.headers = self.open_pipe(_HEADERS, os.O_RDONLY | os.O_NONBLOCK)
        # a pipe for writing alone would wait for the sender
        self._credits = self.open_pipe(_CREDITS, os.O_RDWR)
        self._unread: deque[tuple[int, int]] = deque()
        self._start = 0

    def poll(self) -> int | None:
        """Returns the next message's digest, after which `read` takes the message; None where
        nothing has come yet. Raises PeerLostError where the sender is gone."""
        if not self._unread:
            # all of them: only an empty page of a pipe is written again from its start
            headers = read_pipe(self.headers, _HEADER.size * _MOST_IN_RING, self._peer)
            self._unread.extend(_HEADER.iter_unpack(headers))
        if not self._unread:
            return None
        digest, self._start = self._unread.popleft()
        return digest

    def read(self, into: Sequence[Tensor]) -> None:
        """Copies the message into tensors of the shapes that were sent, and gives its place in the
        ring back."""
        for tensor, place in self._places(self._start, into):
            tensor.copy_(place)
        os.write(self._credits, b"\0")


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

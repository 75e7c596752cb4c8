"""One-way links between two processes of a host, through a ring buffer in shared memory.

A gloo send costs about 60 microseconds of CPU time for any size (docs/benchmarks.md), more than the
work of a small stage. Here the sender copies a message into the ring and writes its position and a
digest of its shapes and dtypes into a pipe. The receiver waits for that pipe, copies the message,
and returns a byte that frees the memory.

A sender never blocks. A message that does not fit stays in the sender's queue until the rank sends,
receives or waits again.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from parallel3d.shared_memory.segment import PeerLostError, Segment, read_pipe, reserve

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.

RING_BYTES = 4 * 2**20
# Larger messages go through the backend, which copies in the background.
LARGEST_BYTES = RING_BYTES // 4
ALIGNMENT = 64  # Alignment in bytes of each tensor in a message.
_HEADER = struct.Struct("<II")  # Digest, and start of the message in the ring.
# The headers must fit into one page, the smallest pipe, so that a write never blocks.
_MOST_IN_RING = 4096 // _HEADER.size
_HEADERS = "headers"
_CREDITS = "credits"


class _RingEnd(Segment):
    """One end of a link. `peer` is the pipeline rank at the other end."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder)
        self._peer = f"pipeline rank {peer}"

    def _places(self, start: int, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor of a message with its view in the ring."""
        for tensor in tensors:
            yield tensor, self.view(start, tensor)
            start += _aligned(tensor)


class Outgoing(_RingEnd):
    """Sender's end of a link. Create the receiver's end first: a write pipe needs a reader."""

    def __init__(self, folder: Path, peer: int) -> None:
        super().__init__(folder, peer)
        self._headers = self.open_pipe(_HEADERS, os.O_WRONLY)
        self.credits = self.open_pipe(_CREDITS, os.O_RDONLY | os.O_NONBLOCK)
        self._queue: deque[tuple[int, Sequence[Tensor]]] = deque()
        self._in_ring: deque[int] = deque()  # Bytes of each message in the ring, oldest first.
        self._next = 0  # Byte in the ring at which the next message starts.

    @property
    def is_waiting(self) -> bool:
        """True if messages are queued because the ring is full."""
        return bool(self._queue)

    def send(self, digest: int, tensors: Sequence[Tensor]) -> None:
        """Sends or queues a message of at most LARGEST_BYTES. Raises as `flush` does."""
        self._queue.append((digest, tensors))
        self.flush()

    def flush(self) -> None:
        """Sends the queued messages that fit into the ring. Raises PeerLostError."""
        if self._in_ring:
            for _ in read_pipe(self.credits, _MOST_IN_RING, self._peer):
                self._in_ring.popleft()
        while self._queue and len(self._in_ring) < _MOST_IN_RING:
            digest, tensors = self._queue[0]
            size = sum(map(_aligned, tensors))
            if not self._in_ring:
                self._next = 0  # Reusing the same memory keeps it in cache.
            start = self._next
            taken = size
            if start + size > RING_BYTES:  # Messages are contiguous: skip the rest of the ring.
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
                raise PeerLostError(f"lost connection to {self._peer}") from None


class Incoming(_RingEnd):
    """Receiver's end of a link.

    It creates the link in a new folder. Raises OSError if memory is insufficient.
    """

    def __init__(self, folder: Path, peer: int) -> None:
        folder.mkdir()
        reserve(folder, RING_BYTES, (_HEADERS, _CREDITS))
        super().__init__(folder, peer)
        self.headers = self.open_pipe(_HEADERS, os.O_RDONLY | os.O_NONBLOCK)
        # Opening it write-only would wait for the sender.
        self._credits = self.open_pipe(_CREDITS, os.O_RDWR)
        self._unread: deque[tuple[int, int]] = deque()
        self._start = 0

    def poll(self) -> int | None:
        """Returns the digest of the next message, or None. Call `read` to take the message.

        Raises PeerLostError if the sender died.
        """
        if not self._unread:
            # Read all headers. A pipe reuses a page only once it is empty, so a partly read page
            # could make the sender block.
            headers = read_pipe(self.headers, _HEADER.size * _MOST_IN_RING, self._peer)
            self._unread.extend(_HEADER.iter_unpack(headers))
        if not self._unread:
            return None
        digest, self._start = self._unread.popleft()
        return digest

    def read(self, into: Sequence[Tensor]) -> None:
        """Copies the message that `poll` found into tensors of its shapes, and frees its memory."""
        for tensor, place in self._places(self._start, into):
            tensor.copy_(place)
        os.write(self._credits, b"\0")


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

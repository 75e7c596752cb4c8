"""Shared memory segments with pipes for notification, between processes of one host.

A segment is a folder with one file and some named pipes. One process reserves it, others open it,
and then the folder is removed. Open files stay usable, and nothing is left behind however the
processes end. A pipe whose write end was closed returns end-of-file, so waiting processes notice
the end of a peer.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.

MEMORY_FOLDER = Path("/dev/shm")  # A file system in memory.
_MEMORY = "memory"


@contextmanager
def own_folder(device_type: str) -> Iterator[Path | None]:
    """Context manager that creates a folder for segments in shared memory and removes it on exit.

    By then all other processes must have opened their files. Yields None for devices other than
    CPUs, and if shared memory is full, read-only or missing.
    """
    folder = None
    with ExitStack() as stack:
        if device_type == "cpu":
            with suppress(OSError):
                made = TemporaryDirectory(prefix="parallel3d-", dir=MEMORY_FOLDER)
                folder = Path(stack.enter_context(made))
        yield folder


class PeerLostError(ConnectionError):
    """The peer process at the other end of a pipe died, closed it, or timed out."""


def reserve(folder: Path, nbytes: int, pipes: Iterable[str]) -> None:
    """Creates a segment in a folder. Raises OSError if memory is insufficient.

    It allocates the memory at once. Otherwise the first write could kill the process.
    """
    with (folder / _MEMORY).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    for pipe in pipes:
        os.mkfifo(folder / pipe)


class Segment:
    """A segment opened by this process: its memory as a tensor, and its pipes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipes = ExitStack()
        # Closes the pipes, which notifies peers. Not in __del__, because `os` may be gone at
        # interpreter exit.
        self.close = weakref.finalize(self, self._pipes.close)
        with (folder / _MEMORY).open("r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def open_pipe(self, name: str, mode: int) -> int:
        """Opens a pipe of the segment and returns its file descriptor.

        Open the read end first, non-blocking, because opening the write end waits for a reader.
        """
        pipe = os.open(self._folder / name, mode)
        self._pipes.callback(os.close, pipe)
        return pipe

    def view(self, start: int, like: Tensor) -> Tensor:
        """Returns the memory from byte `start` as a tensor with the shape and dtype of `like`."""
        return self._memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def read_pipe(pipe: int, count: int, peer: str) -> bytes:
    """Returns up to `count` available bytes, possibly none. Raises PeerLostError at end of file."""
    try:
        read = os.read(pipe, count)
    except BlockingIOError:
        return b""
    if not read:
        raise PeerLostError(f"lost connection to {peer}")
    return read

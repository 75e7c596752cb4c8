"""A segment: memory that processes of one host share, with pipes beside it that tell them when to
read.

A segment is a folder of one file and some named pipes. One process reserves it, others open it, and
then the folder is removed: what is open stays usable, and nothing is left behind, however the
processes end. A pipe whose other end was closed reads as empty, so that the end of a process wakes
everyone who waits for it.
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

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

MEMORY_FOLDER = Path("/dev/shm")  # a file system in memory
_MEMORY = "memory"


@contextmanager
def own_folder(device_type: str) -> Iterator[Path | None]:
    """Makes a folder in memory for this process's segments, which is removed at the end of the
    block: by then all others must have opened what they need. It is None where tensors on this type
    of device cannot be shared, and where the memory of this host takes no files: it may be full,
    read-only or missing."""
    folder = None
    with ExitStack() as stack:
        if device_type == "cpu":
            with suppress(OSError):
                made = TemporaryDirectory(prefix="parallel3d-", dir=MEMORY_FOLDER)
                folder = Path(stack.enter_context(made))
        yield folder


class PeerLostError(ConnectionError):
    """The process at the other end of a pipe has closed it, has ended, or does not answer in
    time."""


def reserve(folder: Path, nbytes: int, pipes: Iterable[str]) -> None:
    """Makes a segment in a folder. Raises OSError if there is no room for it: memory that is only
    promised would end the process when it is first written."""
    with (folder / _MEMORY).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    for pipe in pipes:
        os.mkfifo(folder / pipe)


class Segment:
    """A segment as one process has it open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipes = ExitStack()
        # Closes the pipes: the processes at their other ends then know that this one is gone. Not
        # __del__: at the end of the interpreter that may find `os` gone already.
        self.close = weakref.finalize(self, self._pipes.close)
        with (folder / _MEMORY).open("r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def open_pipe(self, name: str, mode: int) -> int:
        """Opens one of the segment's pipes and returns its descriptor. A reader opens it first,
        without blocking; a writer would wait for the reader."""
        pipe = os.open(self._folder / name, mode)
        self._pipes.callback(os.close, pipe)
        return pipe

    def view(self, start: int, like: Tensor) -> Tensor:
        """Returns the memory from byte `start` on as a tensor of the shape and dtype of `like`."""
        return self._memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def read_pipe(pipe: int, count: int, peer: str) -> bytes:
    """Returns at most `count` bytes, and none if none is there yet. Raises PeerLostError if the
    other end is gone, which is that of `peer`."""
    try:
        read = os.read(pipe, count)
    except BlockingIOError:
        return b""
    if not read:
        raise PeerLostError(f"{peer} has gone")
    return read

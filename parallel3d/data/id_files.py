"""Files of token ids: a stream of several of them, and the writer of one.

Files are read by position into the batch's own array. No file is mapped, so a process's memory does not grow with what
it has read, and a file that shrinks under a run is an error with a message.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from parallel3d.data.windows import TokenIds
from parallel3d.errors import DataError

_OPEN_FILES = 64  # a stream keeps no more of them open: a corpus may have more shards than a process may open


@dataclass(frozen=True)
class FileSlice:
    """The ids `first` to `first + tokens` of a file."""

    path: Path
    tokens: int
    first: int = 0


class FileTokens:
    """The stream of ids of several files, one after the other; no more of it is in memory than what `read` returns."""

    def __init__(self, slices: Sequence[FileSlice], dtype: np.dtype[np.integer]) -> None:
        self.slices, self.dtype = tuple(slices), dtype
        self._starts = [0, *accumulate(each.tokens for each in slices)]
        self._descriptor_of = lru_cache(_OPEN_FILES)(_Descriptor)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[starts, length]`; a run may cross from one file into the
        next. Raises DataError for a file that cannot be read."""
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found, starts.tolist(), strict=True):
            at, filled = bisect_right(self._starts, start) - 1, 0
            while filled < length:
                place = start + filled - self._starts[at]
                tokens = min(length - filled, self.slices[at].tokens - place)
                self._fill(row[filled : filled + tokens], self.slices[at], place)
                filled, at = filled + tokens, at + 1
        return found

    def _fill(self, ids: TokenIds, source: FileSlice, place: int) -> None:
        """Fills `ids` with those of `source` from `place` on."""
        at, unread = (source.first + place) * self.dtype.itemsize, ids.data.cast("B")
        try:
            descriptor = self._descriptor_of(source.path)
            while unread:
                count = os.preadv(descriptor.number, [unread], at)
                if not count:
                    raise DataError(f"{source.path}: shrank below {at} bytes while it was read; start the run again")
                at, unread = at + count, unread[count:]
        except OSError as error:
            raise unreadable(source.path, error) from error


class _Descriptor:
    """A file that is open for reading until nothing refers to this object."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


class IdWriter:
    """Writes documents into a file of ids, document by document, and renames it into place when it is whole. Left by an
    error, it leaves no file. Each document is followed by `end_of_text`, unless that is None."""

    def __init__(self, path: Path, *, dtype: str, vocab_size: int, end_of_text: int | None) -> None:
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self.tokens = self.crc32 = self.largest_id = 0
        self.starts = array("Q")
        self._limit = min(vocab_size - 1, np.iinfo(self.dtype).max)
        self._end = np.array([] if end_of_text is None else [end_of_text], dtype=np.int64)
        self._partial = path.with_name(f"{path.name}.partial")

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb")
        return self

    def add(self, document: TokenIds) -> None:
        """Appends a document, as `add_ended` does."""
        ids = np.append(document, self._end)
        if len(ids):
            self.add_ended(ids, np.array([len(ids)]))

    def add_ended(self, ids: TokenIds, lengths: NDArray[np.integer]) -> None:
        """Appends documents of these lengths whose ends of text are among `ids` already. Raises DataError for an id
        that the vocabulary or the ids' type does not have."""
        starts = np.cumsum(lengths) - lengths
        if ids.min() < 0 or ids.max() > self._limit:
            wrong = np.flatnonzero((ids < 0) | (ids > self._limit))[0]
            document = len(self.starts) + np.searchsorted(starts, wrong, side="right") - 1
            raise DataError(f"{self.path}: token id {ids[wrong]} of document {document}: ids are 0 to {self._limit}")
        raw = ids.astype(self.dtype).tobytes()
        self._file.write(raw)
        self.starts.extend((self.tokens + starts).tolist())
        self.tokens += len(ids)
        self.crc32, self.largest_id = zlib.crc32(raw, self.crc32), max(self.largest_id, int(ids.max()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        if kind is not None:
            self._partial.unlink()
            return
        self._write_documents()
        self._partial.replace(self.path)

    def _write_documents(self) -> None:
        """Writes the file beside the ids that says where documents begin; called before the ids are in place."""
        raise NotImplementedError


def open_regular(path: str | Path, flags: int) -> int:
    """Opens a file for `open`, and never waits. Raises OSError for anything but a regular file: to open a pipe would
    wait for its writer for ever."""
    number = os.open(path, flags | os.O_NONBLOCK)  # which changes nothing of a regular file
    if stat.S_ISREG(os.fstat(number).st_mode):
        return number
    os.close(number)
    raise OSError(errno.EINVAL, "it is not a regular file")


def check_size(path: Path, size_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if found != size_bytes:
        raise DataError(f"{path}: has {found} bytes and must have {size_bytes}; copy it again, or write it anew")


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}); make it readable, or name another data.path")

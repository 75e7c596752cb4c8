"""Megatron's data set: the ids in PREFIX.bin and an index in PREFIX.idx, read as one stream and written."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from parallel3d.data.id_files import FileSlice, IdWriter, check_size, open_regular, unreadable
from parallel3d.errors import DataError

# Megatron's header: a magic, the version, the code of the ids' type, the numbers of sequences and of document borders.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CHUNK = 1 << 22  # sequences


@dataclass(frozen=True)
class MegatronIndex:
    """The header of PREFIX.idx; lengths, pointers and borders of documents are read where they are needed."""

    path: Path
    dtype: np.dtype[np.integer]
    sequences: int
    borders: int  # the ends of documents, and the first one's start

    @classmethod
    def read(cls, path: Path) -> MegatronIndex:
        """Reads the header. Raises DataError for another file, or one that is shorter than it says."""
        try:
            with open(path, "rb", opener=open_regular) as file:
                raw = file.read(_HEADER.size)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
            raise DataError(f"{path}: is no index of Megatron's; give the path of PREFIX.bin and PREFIX.idx as PREFIX")
        _, version, code, sequences, borders = _HEADER.unpack(raw)
        if version != _VERSION or code not in _DTYPES:
            raise DataError(f"{path}: version {version}, type of ids {code}; version 1 of an integer type can be read")
        index = cls(path, np.dtype(_DTYPES[code]).newbyteorder("<"), sequences, borders)
        if path.stat().st_size < index._at("borders") + 8 * borders or borders < 2 or not sequences:
            raise DataError(f"{path}: has not the {sequences} sequences that it says; build it anew")
        return index

    @property
    def tokens(self) -> int:
        """The number of tokens in PREFIX.bin."""
        return self.start_of(self.sequences)

    def start_of(self, sequence: int) -> int:
        """Returns the place of a sequence's first token; of the number of sequences, the end of the last one."""
        last = min(sequence, self.sequences - 1)
        start = int(self.values("pointers", last, 1)[0]) // self.dtype.itemsize
        return start + int(self.values("lengths", last, 1)[0]) * (sequence > last)

    def values(self, table: Literal["lengths", "pointers", "borders"], first: int, count: int) -> NDArray[np.integer]:
        """Returns `count` values of one of the index's tables."""
        dtype = np.dtype("<i4" if table == "lengths" else "<i8")
        return np.fromfile(self.path, dtype, count, offset=self._at(table) + first * dtype.itemsize)

    def _at(self, table: str) -> int:
        return _HEADER.size + {"lengths": 0, "pointers": 4, "borders": 12}[table] * self.sequences


def split(prefix: Path, validation_fraction: float) -> tuple[tuple[FileSlice, FileSlice], np.dtype[np.integer]]:
    """Returns the ids for training and for validation, which are the last `validation_fraction` of the documents, and
    their type. Raises DataError where a file is missing or not as long as it has to be."""
    path = Path(f"{prefix}.bin")
    if not path.exists():
        raise DataError(f"{prefix}: is no folder of tokens, and there is no {path}; try a folder with a tokens.json")
    index = MegatronIndex.read(Path(f"{prefix}.idx"))
    check_size(path, index.tokens * index.dtype.itemsize)
    documents = index.borders - 1
    if documents > 1:
        first = documents - min(max(round(documents * validation_fraction), 1), documents - 1)
        border = index.start_of(int(index.values("borders", first, 1)[0]))
    else:  # as with a single file of text, its end is for validation
        border = index.tokens - max(round(index.tokens * validation_fraction), 1)
    return (FileSlice(path, border), FileSlice(path, index.tokens - border, border)), index.dtype


def verify(prefix: Path) -> Iterator[str]:
    """Reads the whole index, and yields a line for each fault in it."""
    split(prefix, 0.05)
    index, end = MegatronIndex.read(Path(f"{prefix}.idx")), 0
    for first in range(0, index.sequences, _CHUNK):
        count = min(_CHUNK, index.sequences - first)
        lengths = index.values("lengths", first, count).astype(np.int64)
        ends = end + np.cumsum(lengths)
        starts_bytes = (ends - lengths) * index.dtype.itemsize
        if lengths.min() < 0 or (index.values("pointers", first, count) != starts_bytes).any():
            yield f"{index.path}: its sequences do not follow each other in {prefix}.bin, which is read as one stream"
            return
        end = int(ends[-1])
    borders = index.values("borders", 0, index.borders)
    if borders[0] != 0 or borders[-1] != index.sequences or (borders[1:] < borders[:-1]).any():
        yield f"{index.path}: the borders of its documents must rise from 0 to {index.sequences}"


class MegatronWriter(IdWriter):
    """Writes PREFIX.bin and PREFIX.idx as Megatron's own builder does, a document a sequence; `path` is PREFIX.bin."""

    def _write_documents(self) -> None:
        code = {name: code for code, name in _DTYPES.items()}[self.dtype.name]
        starts = np.array(self.starts, dtype="<i8")
        lengths = np.diff(np.append(starts, self.tokens))
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"{self.path}: a document of {lengths.max()} tokens; Megatron's index counts to 2^31 - 1")
        with self.path.with_suffix(".idx").open("wb") as file:
            borders = len(starts) + 1
            file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(starts), borders))
            file.write(lengths.astype("<i4").tobytes())
            file.write((starts * self.dtype.itemsize).tobytes())
            file.write(np.arange(borders, dtype="<i8").tobytes())

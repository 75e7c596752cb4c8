"""Reads and writes pieces of tensors in the files of a checkpoint.

Each rank writes its parts into one file in the format of torch.distributed.checkpoint (DCP).
Checksums are computed from the bytes in memory, before the disk can corrupt them.

Reading needs only the manifest and the elements. DCP's index and the pickle data around each piece
are never loaded, so reading cannot run code from a checkpoint.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.serialization import skip_data

from parallel3d.checkpoint.manifest import Damage, SavedFile, SavedPiece, SavedTensor
from parallel3d.torch_private import local_of, offsets_of

# Bytes per write. A chunk is checksummed and written while it is in the CPU cache.
_WRITTEN_BYTES = 1 << 19
_READ_BYTES = 64 << 20  # Size limit of the read buffer in bytes. A single row can exceed it.


@dataclass(frozen=True)
class WrittenShard:
    """File that a rank wrote, and the pieces in it. Empty if the rank has no parts."""

    files: dict[str, SavedFile]
    pieces: list[tuple[MetadataIndex, SavedPiece]]


def write_shard(folder: Path, rank: int, parts: Sequence[tuple[WriteItem, Tensor]]) -> WrittenShard:
    """Writes and syncs the file of a rank, unless it has no parts."""
    if not parts:
        return WrittenShard({}, [])
    name = f"__{rank}_0.distcp"
    crc = 0
    pieces = []
    with (folder / name).open("wb") as file:
        for item, part in parts:
            at = file.tell()
            head, tail = _frame(part.dtype, part.shape)
            elements = part.cpu().reshape(-1).view(torch.uint8).numpy().data
            for content in (memoryview(head), elements, memoryview(tail)):
                for start in range(0, len(content), _WRITTEN_BYTES):
                    chunk = content[start : start + _WRITTEN_BYTES]
                    crc = zlib.crc32(chunk, crc)
                    file.write(chunk)
            assert item.tensor_data is not None
            box = item.tensor_data.chunk
            end = file.tell()
            offsets = tuple(box.offsets)
            sizes = tuple(box.sizes)
            piece = SavedPiece(name, at, end - at, at + len(head), f"{crc:08x}", offsets, sizes)
            pieces.append((item.index, piece))
        file.flush()
        os.fsync(file.fileno())
        return WrittenShard({name: SavedFile(file.tell(), f"{crc:08x}")}, pieces)


@cache
def _frame(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Returns the bytes that torch.save would write before and after the elements of a tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    with TemporaryFile() as file:
        with skip_data():  # Makes torch.save leave out the elements.
            torch.save(tensor, file)
        with ZipFile(file) as archive, archive.open("archive/data/0"):
            start = file.tell()
        file.seek(0)
        head = file.read(start)
        file.seek(start + tensor.nbytes)
        return head, file.read()


def read_own_part(folder: Path, saved: SavedTensor, tensor: Tensor) -> None:
    """Reads this rank's shard of a DTensor, or a full plain tensor, in place."""
    if not isinstance(tensor, DTensor):
        read_box(folder, saved, [0] * tensor.ndim, tensor.detach())
    elif local_of(tensor).numel():
        read_box(folder, saved, offsets_of(tensor), local_of(tensor).detach())


def read_box(folder: Path, saved: SavedTensor, offsets: Sequence[int], target: Tensor) -> None:
    """Reads a region of a saved tensor into `target`.

    The region starts at `offsets` and has the shape of `target`. Raises DamagedCheckpointError if a
    file cannot be read.
    """
    for piece in saved.pieces:
        part = target
        starts = []
        for dim, first in enumerate(piece.offsets):
            begin = offsets[dim]
            start = max(first, begin)
            end = min(first + piece.sizes[dim], begin + target.shape[dim])
            part = part.narrow(dim, min(start - begin, target.shape[dim]), max(end - start, 0))
            starts.append(start - first)
        if not part.numel():
            continue
        try:
            with (folder / piece.file).open("rb", buffering=0) as file:
                _read_piece(file, piece, getattr(torch, saved.dtype), starts, part)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise Damage(piece.file, reason).error(folder) from error


def _read_piece(
    file: FileIO, piece: SavedPiece, dtype: torch.dtype, starts: list[int], target: Tensor
) -> None:
    """Reads the region of a piece that starts at `starts` into `target`, in batches of rows."""
    sizes = piece.sizes or (1,)  # A scalar is read as one row.
    target = torch.atleast_1d(target)
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    file.seek(piece.data + sum(starts[:1]) * row_bytes)
    for rows in target.split(max(1, _READ_BYTES // row_bytes)):
        raw = np.fromfile(file, np.uint8, len(rows) * row_bytes)
        read = torch.from_numpy(raw).view(dtype).view(len(rows), *sizes[1:])
        for dim, start in enumerate(starts[1:], start=1):
            read = read.narrow(dim, start, rows.shape[dim])
        rows.copy_(read)

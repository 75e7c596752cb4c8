"""Writes one rank's parts of a checkpoint into one file, in the form of
torch.distributed.checkpoint, and takes the checksum of every byte on its way to the file: what the
disk then makes of it cannot become its own proof."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.serialization import get_crc32_options, set_crc32_options

from parallel3d.checkpoint.manifest import SavedFile, SavedPiece

_AT_ONCE_BYTES = 1 << 19  # is summed and written while it is in the processor's cache


@dataclass(frozen=True)
class WrittenShard:
    """The file that a rank has written, and its pieces."""

    files: dict[str, SavedFile]
    pieces: list[tuple[MetadataIndex, SavedPiece]]


def write_shard(folder: Path, rank: int, parts: Sequence[tuple[WriteItem, Tensor]]) -> WrittenShard:
    """Writes and syncs the file of a rank, unless it has no part. Raises OSError."""
    if not parts:
        return WrittenShard({}, [])
    name, pieces = f"__{rank}_0.distcp", []
    # torch's own CRC-32 of each tensor costs time, and its reader never compares it.
    summed = get_crc32_options()
    set_crc32_options(False)
    try:
        with (folder / name).open("wb") as raw:
            file = _SummedFile(raw)
            for item, part in parts:
                assert item.tensor_data is not None
                at, chunk = file.position, item.tensor_data.chunk
                data = file.save(part)
                place = (name, at, file.position - at, data, f"{file.crc:08x}")
                piece = SavedPiece(*place, tuple(chunk.offsets), tuple(chunk.sizes))
                pieces.append((item.index, piece))
            raw.flush()
            os.fsync(raw.fileno())
    finally:
        set_crc32_options(summed)
    return WrittenShard({name: SavedFile(file.position, f"{file.crc:08x}")}, pieces)


class _SummedFile:
    """A file for torch.save that takes the checksum of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = self.crc = 0
        self._address = self._elements = 0

    def save(self, part: Tensor) -> int:
        """Writes a tensor as torch.save does, and returns the place of its elements, which are
        known by their address."""
        tensor = torch.empty(part.shape, dtype=part.dtype)
        if part.numel():  # share the part's memory, without the rest of what it is a view of
            flat = part.cpu().reshape(-1).view(torch.uint8).numpy()
            tensor = torch.from_numpy(flat).view(part.dtype).view(part.shape)
        self._address, self._elements = tensor.data_ptr(), -1
        torch.save(tensor, cast(IO[bytes], self))
        assert self._elements >= 0 or not part.numel(), "torch.save has copied the elements"
        return max(self._elements, 0)

    def write(self, data: bytes | memoryview) -> int:
        view = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        if view.ctypes.data == self._address:
            self._elements = self.position
        for start in range(0, len(view), _AT_ONCE_BYTES):
            chunk = view[start : start + _AT_ONCE_BYTES].data
            self.crc = zlib.crc32(chunk, self.crc)
            self._file.write(chunk)
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """Does nothing; torch calls it at the end of each tensor."""

"""Writes one rank's parts of a checkpoint into one file, in the form of
torch.distributed.checkpoint, and takes the checksum of every byte on its way to the file: what the
disk then makes of it cannot become its own proof."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.serialization import get_crc32_options, set_crc32_options

from parallel3d.checkpoint.manifest import SavedFile, SavedPiece, SavedTensor
from parallel3d.torch_private import DcpPlace

_AT_ONCE_BYTES = 1 << 19  # is summed and written while it is in the processor's cache


@dataclass(frozen=True)
class WrittenShard:
    """What a rank has written: the file, its pieces by tensor, and where DCP's index says that they
    are."""

    files: dict[str, SavedFile]
    tensors: list[tuple[str, SavedTensor]]  # each with one piece
    places: dict[MetadataIndex, DcpPlace]


def write_shard(folder: Path, rank: int, parts: Sequence[tuple[WriteItem, Tensor]]) -> WrittenShard:
    """Writes and syncs the file of a rank, unless it has no part. Raises OSError."""
    shard = WrittenShard({}, [], {})
    if not parts:
        return shard
    name, position, crc = f"__{rank}_0.distcp", 0, 0
    with (folder / name).open("wb") as file:
        for item, part in parts:
            at = position
            head, tail = _frame(part.dtype, part.shape)
            for content in (head, _elements(part), tail):
                for start in range(0, len(content), _AT_ONCE_BYTES):
                    chunk = content[start : start + _AT_ONCE_BYTES]
                    crc = zlib.crc32(chunk, crc)
                    file.write(chunk)
                position += len(content)
            assert item.tensor_data is not None
            chunk_of, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
            place = (name, at, position - at, at + len(head), f"{crc:08x}")
            piece = SavedPiece(*place, tuple(chunk_of.offsets), tuple(chunk_of.sizes))
            dtype = str(part.dtype).removeprefix("torch.")
            shard.tensors.append((item.index.fqn, SavedTensor(dtype, shape, (piece,))))
            shard.places[item.index] = DcpPlace(name, at, position - at)
        file.flush()
        os.fsync(file.fileno())
    shard.files[name] = SavedFile(position, f"{crc:08x}")
    return shard


def _elements(part: Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements, row by row; shares the memory if they lie so on the
    CPU."""
    return part.cpu().reshape(-1).view(torch.uint8).numpy().data


@lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Returns what torch.save writes before and after the elements of a tensor on the CPU, without
    torch's own CRC-32, which its reader never compares. With it the frame would depend on the
    elements."""
    tensor, summed = torch.empty(shape, dtype=dtype), get_crc32_options()
    sink = _FrameSink(tensor)
    set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], sink))
    finally:
        set_crc32_options(summed)
    assert sink.has_met_the_elements or not tensor.numel(), (
        "torch.save has not written the tensor's own memory"
    )
    return bytes(sink.head), bytes(sink.tail)


class _FrameSink:
    """A file for torch.save that keeps all but the tensor's elements, which it tells by their
    address."""

    def __init__(self, tensor: Tensor) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.has_met_the_elements = False
        self._place = (tensor.data_ptr(), tensor.nbytes)

    def write(self, data: bytes | memoryview) -> int:
        view = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        if (view.ctypes.data, view.nbytes) == self._place:
            self.has_met_the_elements = True
        else:
            (self.tail if self.has_met_the_elements else self.head).extend(view.tobytes())
        return view.nbytes

    def flush(self) -> None:
        """Does nothing; torch calls it at the end."""

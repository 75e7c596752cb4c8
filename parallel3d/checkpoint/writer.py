"""Writes one rank's parts of a checkpoint into one file, in the form of torch.distributed.checkpoint, and takes the
checksum of every byte on its way to the file: what the disk then makes of it cannot become its own proof."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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

_AT_ONCE_BYTES = 1 << 20  # is summed and written while it is in the processor's cache


@dataclass(frozen=True)
class WrittenShard:
    """What a rank has written: the file, its pieces by tensor, and where DCP's index says that they are."""

    files: dict[str, SavedFile]
    tensors: list[tuple[str, SavedTensor]]  # each with one piece
    places: dict[MetadataIndex, DcpPlace]


class _SummedStream:
    """A file that is written once, from its beginning on. `data` is where the last bytes from the address `wanted` are
    in it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.position, self.crc = file, 0, 0
        self.wanted, self.data = 0, 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) and np.frombuffer(view, np.uint8).ctypes.data == self.wanted:
            self.data = self.position
        try:
            for at in range(0, len(view), _AT_ONCE_BYTES):
                chunk = view[at : at + _AT_ONCE_BYTES]
                self.crc = zlib.crc32(chunk, self.crc)
                self.file.write(chunk)
        except OSError as error:
            self.error = self.error or error  # torch tells another: `unexpected pos 704 vs 598`
            raise
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """Does nothing; torch calls it after each part."""


def write_shard(folder: Path, rank: int, parts: Sequence[tuple[WriteItem, Tensor]]) -> WrittenShard:
    """Writes and syncs the file of a rank, unless it has no part. Raises OSError."""
    shard = WrittenShard({}, [], {})
    if not parts:
        return shard
    name = f"__{rank}_0.distcp"
    summed = get_crc32_options()
    set_crc32_options(False)  # torch's own CRC-32, which it never reads again
    try:
        with (folder / name).open("wb") as file:
            stream = _SummedStream(file)
            for item, part in parts:
                at = stream.position
                part = _alone(part)
                stream.wanted, stream.data = part.data_ptr(), at
                try:
                    torch.save(part, cast(IO[bytes], stream))
                except RuntimeError:
                    if stream.error is not None:
                        raise stream.error from None
                    raise
                _add(shard, name, item, part, at, stream)
            file.flush()
            os.fsync(file.fileno())
    finally:
        set_crc32_options(summed)
    shard.files[name] = SavedFile(stream.position, f"{stream.crc:08x}")
    return shard


def _add(shard: WrittenShard, name: str, item: WriteItem, part: Tensor, at: int, stream: _SummedStream) -> None:
    """Adds the part that was written last."""
    assert item.tensor_data is not None
    assert stream.data > at or not part.numel(), "torch.save has not written the tensor's own memory"
    length = stream.position - at
    chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
    piece = SavedPiece(name, at, length, stream.data, f"{stream.crc:08x}", tuple(chunk.offsets), tuple(chunk.sizes))
    shard.tensors.append((item.index.fqn, SavedTensor(str(part.dtype).removeprefix("torch."), shape, (piece,))))
    shard.places[item.index] = DcpPlace(name, at, length)


def _alone(part: Tensor) -> Tensor:
    """Returns a part on the CPU as a tensor whose storage has its elements and no other, which torch.save would write
    as well. Shares the memory if it can."""
    if not part.numel():
        return torch.empty(part.shape, dtype=part.dtype)
    data = part.cpu().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(data).view(part.dtype).view(part.shape)


def save_file(path: Path, content: bytes) -> SavedFile:
    """Writes and syncs a small file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(len(content), f"{zlib.crc32(content):08x}")

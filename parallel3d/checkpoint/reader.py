"""Reads tensors of a checkpoint, or boxes of them. It reads only the manifest and the elements: the
index of DCP and the pickles around each piece, which DCP's reader would run, stay unopened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.manifest import Damage, SavedPiece, SavedTensor
from parallel3d.torch_private import local_of, offsets_of

_AT_ONCE_BYTES = 64 << 20  # the largest buffer next to the tensor


def read_tensor(folder: Path, saved: SavedTensor) -> Tensor:
    """Returns a full tensor of a checkpoint, on the CPU."""
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read_box(folder, saved, [0] * tensor.ndim, tensor)
    return tensor


def read_own_part(folder: Path, saved: SavedTensor, tensor: Tensor) -> None:
    """Reads this rank's part of a DTensor, or a full plain tensor, in place."""
    if not isinstance(tensor, DTensor):
        read_box(folder, saved, [0] * tensor.ndim, tensor.detach())
    elif local_of(tensor).numel():
        read_box(folder, saved, offsets_of(tensor), local_of(tensor).detach())


def read_box(folder: Path, saved: SavedTensor, offsets: Sequence[int], target: Tensor) -> None:
    """Fills `target` with the box of a saved tensor that begins at `offsets`, from all pieces that
    overlap it. Raises DamagedCheckpointError if a file cannot be read."""
    for piece in saved.pieces:
        part, starts = target, []
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
        except EOFError:
            raise Damage(piece.file, "was cut short while it was read").error(folder) from None


def _read_piece(
    file: FileIO, piece: SavedPiece, dtype: torch.dtype, starts: list[int], target: Tensor
) -> None:
    """Fills `target` with the elements of a piece from `starts` on, some rows at a time. Raises
    EOFError."""
    sizes = list(piece.sizes) or [1]
    target = target.reshape(-1) if not piece.sizes else target  # a scalar is read as one row
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    file.seek(piece.data + sum(starts[:1]) * row_bytes)
    for rows in target.split(max(1, _AT_ONCE_BYTES // row_bytes)):
        raw = np.fromfile(file, np.uint8, len(rows) * row_bytes)
        if raw.nbytes < len(rows) * row_bytes:
            raise EOFError
        read = torch.from_numpy(raw).view(dtype).view(len(rows), *sizes[1:])
        for dim, start in enumerate(starts[1:], start=1):
            read = read.narrow(dim, start, rows.shape[dim])
        rows.copy_(read)

"""Reads tensors of a checkpoint, or boxes of them. Nothing but the manifest and the elements themselves is read: DCP's
index and the pickles around each piece, which its own reader would run, are never opened."""

from __future__ import annotations

from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.manifest import ITEM_BYTES, Damage, SavedPiece, SavedTensor
from parallel3d.torch_private import local_of, offsets_of

_AT_ONCE_BYTES = 64 << 20  # what is read beside a tensor before it is copied there


def read_tensor(folder: Path, saved: SavedTensor) -> Tensor:
    """Returns a whole tensor of a checkpoint, on the CPU."""
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read_box(folder, saved, [0] * tensor.ndim, tensor)
    return tensor


def read_own_part(folder: Path, saved: SavedTensor, tensor: Tensor) -> None:
    """Reads this rank's part of a tensor that is laid over a mesh, in place, or the whole of one that is not."""
    if not isinstance(tensor, DTensor):
        read_box(folder, saved, [0] * tensor.ndim, tensor.detach())
    elif local_of(tensor).numel():
        read_box(folder, saved, offsets_of(tensor), local_of(tensor).detach())


def read_box(folder: Path, saved: SavedTensor, offsets: Sequence[int], target: Tensor) -> None:
    """Fills `target` with the box of a saved tensor that begins at `offsets`, from all the pieces that have a part of
    it. Raises DamagedCheckpointError where a file cannot be read."""
    for piece in saved.pieces:
        starts = [max(a, b) for a, b in zip(piece.offsets, offsets, strict=True)]
        ends = [
            min(a + size, b + wanted)
            for a, size, b, wanted in zip(piece.offsets, piece.sizes, offsets, target.shape, strict=True)
        ]
        if all(start < end for start, end in zip(starts, ends, strict=True)) and target.numel():
            part = target
            for dim, (start, end) in enumerate(zip(starts, ends, strict=True)):
                part = part.narrow(dim, start - offsets[dim], end - start)
            try:
                _read_piece(folder, piece, saved.dtype, starts, part)
            except OSError as error:
                raise Damage(piece.file, f"cannot be read: {error.strerror}").error(folder) from error


def _read_piece(folder: Path, piece: SavedPiece, dtype: str, starts: Sequence[int], target: Tensor) -> None:
    """Fills `target` with the elements of a piece from `starts` on: straight into its memory where these are
    consecutive in the file, and else some rows at a time."""
    kind, sizes = getattr(torch, dtype), list(piece.sizes) or [1]
    target = target if piece.sizes else target.reshape(1)  # a single number is read as one row
    first = starts[0] - piece.offsets[0] if starts else 0
    row_bytes = ITEM_BYTES[dtype]
    for size in sizes[1:]:
        row_bytes *= size
    whole_rows = list(target.shape[1:]) == sizes[1:]
    with (folder / piece.file).open("rb", buffering=0) as file:
        file.seek(piece.data + first * row_bytes)
        if whole_rows and target.device.type == "cpu" and target.dtype == kind and target.is_contiguous():
            _fill(file, target, piece, folder)
            return
        at_once = max(1, _AT_ONCE_BYTES // row_bytes)
        for rows in target.split(at_once):
            read = torch.empty([len(rows), *sizes[1:]], dtype=kind)
            _fill(file, read, piece, folder)
            for dim, start in enumerate(starts[1:], start=1):
                read = read.narrow(dim, start - piece.offsets[dim], rows.shape[dim])
            rows.copy_(read)


def _fill(file: FileIO, tensor: Tensor, piece: SavedPiece, folder: Path) -> None:
    """Reads a contiguous tensor's bytes from where the file stands."""
    left = tensor.view(-1).view(torch.uint8).numpy().data
    while left:
        count = file.readinto(left)
        if not count:
            raise Damage(piece.file, "was cut short while it was read").error(folder)
        left = left[count:]

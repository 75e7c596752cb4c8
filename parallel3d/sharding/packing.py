"""How rows of many tensors lie where ranks exchange them: [ranks, what a rank has of each], uneven parts filled up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Packing:
    """Of tensors of these shapes, each cut by rows over `ranks`. What fills a part up is never read."""

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self.ranks = ranks
        self._widths = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
        self._is_even = all(shape[0] % ranks == 0 for shape in shapes)
        self.width = sum(self._widths)

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Whole tensors -> [ranks, width]."""
        if self._is_even:
            return torch.cat([tensor.reshape(self.ranks, -1) for tensor in tensors], dim=1).to(dtype)
        packed = torch.empty(self.ranks, self.width, dtype=dtype, device=tensors[0].device)
        for tensor, columns in zip(tensors, self._columns(packed), strict=True):
            for part, place in _blocks(tensor, columns):
                place.copy_(part)
        return packed

    def unpack(self, packed: Tensor, tensors: Sequence[Tensor]) -> None:
        """[ranks, width] -> into whole tensors."""
        for tensor, columns in zip(tensors, self._columns(packed), strict=True):
            for part, place in _blocks(tensor, columns):
                part.copy_(place)

    def pack_own(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's rows -> [width]."""
        if self._is_even:
            return torch.cat([part.flatten() for part in parts]).to(dtype)
        packed = torch.empty(self.width, dtype=dtype, device=parts[0].device)
        for part, place in zip(parts, packed.split(self._widths), strict=True):
            place[: part.numel()].copy_(part.flatten())
        return packed

    def unpack_own(self, packed: Tensor, parts: Sequence[Tensor]) -> None:
        """[width] -> into this rank's rows."""
        for part, place in zip(parts, packed.split(self._widths), strict=True):
            part.copy_(place[: part.numel()].view_as(part))

    def _columns(self, packed: Tensor) -> Sequence[Tensor]:
        return packed.split(self._widths, dim=1)


def _blocks(tensor: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What of `tensor` [rows, ...] goes where in `columns` [ranks, width]: the ranks that have all their rows in one
    piece, then the one that has a few. However many ranks: a copy for each would take seconds at hundreds."""
    rows, row = tensor.shape[0], tensor.shape[1:].numel()
    each = columns.shape[1] // row
    full, few = divmod(rows, each)
    if full:
        yield (
            tensor[: full * each].view(full, each, *tensor.shape[1:]),
            columns[:full].unflatten(1, (each, *tensor.shape[1:])),
        )
    if few:
        yield tensor[full * each :], columns[full, : few * row].unflatten(0, (few, *tensor.shape[1:]))

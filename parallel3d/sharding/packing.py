"""How rows of many tensors lie where ranks exchange them: [ranks, what a rank has of each], uneven parts filled up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.sharding.part import own_rows


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
            for rank in range(self.ranks):
                rows = own_rows(tensor, rank, self.ranks)
                columns[rank, : rows.numel()].copy_(rows.flatten())
        return packed

    def unpack(self, packed: Tensor, tensors: Sequence[Tensor]) -> None:
        """[ranks, width] -> into whole tensors."""
        for tensor, columns in zip(tensors, self._columns(packed), strict=True):
            if tensor.numel() == columns.numel() and tensor.is_contiguous():
                tensor.view(columns.shape).copy_(columns)
                continue
            for rank in range(self.ranks):
                rows = own_rows(tensor, rank, self.ranks)
                rows.copy_(columns[rank, : rows.numel()].view_as(rows))

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

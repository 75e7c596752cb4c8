"""How rows of many tensors travel between data ranks: packed into [ranks, width], reduce-scattered
or all-gathered.

[Note: gloo] gloo's own reduce-scatter takes more processor time than its all-reduce, and its
all-gather twice that of broadcasts. Between CPUs rows therefore travel by an all-to-all and are
summed here, in the order of the ranks, and parameters travel by a broadcast from each rank: the
same bytes in less than half of the time (docs/sharding.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.layers.collectives import after, start_gather, start_reduce_scatter
from parallel3d.mesh import Axis
from parallel3d.shard_sizes import largest_shard

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat


class Packing:
    """The layout of tensors of some shapes, each cut by rows over `ranks`, in one tensor [ranks,
    width]. A rank that has fewer rows than rank 0 has a gap, which is never read."""

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self.ranks = ranks
        self._widths = [largest_shard(shape[0], ranks) * shape[1:].numel() for shape in shapes]
        self.width = sum(self._widths)

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Writes whole tensors into a new tensor [ranks, width]."""
        packed = torch.empty(self.ranks, self.width, dtype=dtype, device=tensors[0].device)
        for part, place in self._blocks(tensors, packed):
            place.copy_(part)
        return packed

    def unpack(self, packed: Tensor, tensors: Sequence[Tensor]) -> None:
        """Writes [ranks, width] back into whole tensors."""
        for part, place in self._blocks(tensors, packed):
            part.copy_(place)

    def pack_own(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Writes this rank's rows of each tensor into a new tensor [width]."""
        packed = torch.empty(self.width, dtype=dtype, device=parts[0].device)
        for part, place in zip(parts, packed.split(self._widths), strict=True):
            place[: part.numel()].copy_(part.flatten())
        return packed

    def unpack_own(self, packed: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes [width] back into this rank's rows of each tensor."""
        for part, place in zip(parts, packed.split(self._widths), strict=True):
            part.copy_(place[: part.numel()].view_as(part))

    def _blocks(self, tensors: Sequence[Tensor], packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields parts of each tensor [rows, ...] with their places in its columns of `packed`:
        first all ranks that have a full share of rows, in one piece, then the rank that has fewer.
        A copy for each rank would take seconds at hundreds of ranks."""
        for tensor, columns in zip(tensors, packed.split(self._widths, dim=1), strict=True):
            row_shape = tensor.shape[1:]
            each = columns.shape[1] // row_shape.numel()
            full, few = divmod(tensor.shape[0], each)
            if full:
                shape = (each, *row_shape)
                whole = tensor[: full * each].view(full, *shape)
                yield whole, columns[:full].unflatten(1, shape)
            if few:
                last = columns[full, : few * row_shape.numel()]
                yield tensor[full * each :], last.unflatten(0, (few, *row_shape))


def start_row_reduction(rows: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Starts to sum `rows` [ranks, width] over the axis. Returns a function that waits for this
    rank's row [width] of the sum."""
    if dist.get_backend(axis.group) != "gloo":
        pending = start_reduce_scatter(rows, axis, 0)
        return lambda: pending()[0]
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=axis.group, async_op=True)

    def add() -> Tensor:
        total, *others = after(work, received, rows).unbind(0)
        for other in others:
            total += other
        return total

    return add


def start_row_gather(own: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Starts to gather the rows of all ranks, of which this rank has `own` [width]. Returns a
    function that waits for [ranks, width]."""
    if dist.get_backend(axis.group) != "gloo":
        return start_gather(own[None], axis, 0)
    rows = own.new_empty(axis.size, len(own))
    rows[axis.rank] = own
    works = []
    for rank, row in enumerate(rows.unbind(0)):
        works.append(dist.broadcast(row, group=axis.group, group_src=rank, async_op=True))

    def finish() -> Tensor:
        for work in works:
            after(work, rows)
        return rows

    return finish

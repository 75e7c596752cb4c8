"""Gradient buckets of replicated parameters, and their communication.

Gradients are views into a bucket (`.grad`, or `main_grad` for fused gradients). Microbatches
accumulate directly into it. The all-reduce reads it without a copy if the dtypes match. One call
clears it.

[Note: gloo] gloo's reduce-scatter takes more CPU time than its all-reduce. Its all-gather takes
twice the CPU time of broadcasts. With gloo, gradients are therefore sent by an all-to-all and
summed here in rank order, and parameters are sent by one broadcast per rank. This sends the same
number of bytes in less than half the time (docs/reference/sharding.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d.layers.collectives import after, all_gather_single, start_reduce_scatter
from parallel3d.layers.weight_gradients import as_dtensor, like_parameter, local_tensor
from parallel3d.mesh import DATA_ROLES, Axis, Role
from parallel3d.shard_sizes import largest_shard
from parallel3d.sharding.optimizer_parts import OptimizerPart
from parallel3d.sharding.settings import Reduction
from parallel3d.torch_private import foreach_copy_
from parallel3d.watch.step_clock import timed_as

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.


class ReplicatedPart(OptimizerPart):
    """A replicated parameter, and the part of it that this rank's optimizer updates.

    The part is this rank's rows, or all rows, of the parameter or of its master copy. The master
    copy starts as `value`. `memory`, a slice of the bucket, holds the gradient.
    """

    def __init__(
        self, parameter: nn.Parameter, value: Tensor, memory: Tensor, reduction: Reduction
    ) -> None:
        self._reduction = reduction
        self.parameter = parameter
        master = reduction.dtypes.master
        self.has_master = master != reduction.dtypes.compute
        start = value if self.has_master else parameter
        whole = local_tensor(start.detach())
        own = reduction.own(whole)
        if self.has_master:
            own = own.to(master, copy=True)
        self.local = nn.Parameter(own, requires_grad=parameter.requires_grad)
        self.repeated_over = frozenset({Role.REPLICATE} if reduction.split else DATA_ROLES)
        self.gradient = memory.view(whole.shape)
        self.own_gradient = reduction.own(self.gradient)
        # `.grad` of the parameter if that is a view of the bucket, else None.
        self.attached: Tensor | None = None
        if not parameter.requires_grad:
            return
        # Backward passes accumulate into the bucket. If `.grad` has a different dtype, a hook adds
        # it to the bucket.
        parameter.main_grad = self.gradient  # type: ignore[attr-defined]
        if parameter.dtype == self.gradient.dtype:
            self.attached = like_parameter(parameter, self.gradient)
            parameter.grad = self.attached
        else:
            # A function: the garbage collector cannot free a parameter that its own hook refers to.
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def sync_views(self) -> None:
        if self.local.requires_grad:
            self.local.grad = self.own_gradient

    def distributed(self, local: Tensor) -> Tensor:
        parameter = self.parameter
        mesh = self._reduction.mesh
        if not self._reduction.split:
            return like_parameter(parameter, local)
        if not isinstance(parameter, DTensor):
            return as_dtensor(local, mesh[Role.SHARD_PARAMETERS], [Shard(0)], parameter)
        # The placement on tp comes first. The rows are then split over dp_shard.
        names = (Role.SPLIT_TENSORS, Role.SHARD_PARAMETERS)
        both = mesh[names[::-1]]
        groups = [both.get_group(name) for name in names]
        ranks = both.mesh.t().contiguous()
        joined = DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)
        return as_dtensor(local, joined, [*parameter.placements, Shard(0)], parameter)

    @torch.no_grad()
    def initialize(self, draw: Callable[[Axis], Tensor]) -> None:
        values = draw(Axis.of(None))
        local_tensor(self.parameter).copy_(values)
        if self.has_master:
            self.local.copy_(self._reduction.own(values))


def _add_to_main_grad(parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(local_tensor(parameter.grad))
        parameter.grad = None


class Bucket:
    """Gradients of `parts`, stored one after the other in `memory`.

    Gradients of frozen parameters are zeros. `originals` maps cast parameters to their
    original values; the constructor removes those it uses.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        originals: dict[nn.Parameter, Tensor],
        memory: Tensor,
        reduction: Reduction,
    ) -> None:
        self.memory = memory
        self._reduction = reduction
        self._pending: Callable[[], Tensor] | None = None
        self.parts = []
        sizes = [local_tensor(parameter.detach()).numel() for parameter in parameters]
        for parameter, piece in zip(parameters, memory.split(sizes), strict=True):
            value = originals.pop(parameter, parameter)
            self.parts.append(ReplicatedPart(parameter, value, piece, reduction))
        if reduction.split:
            shapes = [part.gradient.shape for part in self.parts]
            self._packing = Packing(shapes, reduction.shard.size)

    @timed_as("dp")
    def start_reduction(self) -> None:
        """Starts the reduction of the gradients over the DP ranks, in the reduction dtype."""
        over = self._reduction
        dtype = over.dtypes.reduce
        if over.split:
            rows = self._packing.empty(self.memory, dtype)
            self._packing.pack([part.gradient for part in self.parts], rows)
            self._pending = start_row_reduction(rows, over.shard)
        elif over.every.size > 1:
            sent = self.memory.to(dtype)
            work = dist.all_reduce(sent, group=over.every.group, async_op=True)
            self._pending = partial(after, work, sent)

    @timed_as("dp")
    def finish_reduction(self) -> None:
        """Waits for the reduction and writes the result to `own_gradient` of every part."""
        if self._pending is None:
            return
        over = self._reduction
        # Clearing `_pending` frees the buffers that were sent.
        total, self._pending = self._pending(), None
        if not over.split:
            total = self.memory.copy_(total)  # No copy if the total is the memory itself.
        elif over.replicate.size > 1:
            dist.all_reduce(total, group=over.replicate.group)
        scale = 1.0 / over.every.size if over.average else 1.0
        if over.split:
            own_gradients = [part.own_gradient for part in self.parts]
            self._packing.unpack(total[None], own_gradients, scale=scale)
        elif over.average:
            total.mul_(scale)

    @timed_as("dp")
    def start_publish(self) -> Callable[[], Tensor | None]:
        """Starts the all-gather of updated rows, if they are split over ranks.

        Returns a function that waits for the rows of all ranks and returns them, or returns None.
        """
        over = self._reduction
        if not over.split:
            return lambda: None
        rows = self._packing.empty(self.memory, over.dtypes.compute)
        own = rows[over.shard.rank]
        self._packing.pack([part.local for part in self.parts], own[None])
        return start_row_gather(rows, over.shard)

    def finish_publish(self, rows: Tensor | None) -> None:
        """Copies all ranks' `rows`, or this rank's master copies if None, into the parameters."""
        wholes = [local_tensor(part.parameter) for part in self.parts]
        has_master = self.parts[0].has_master
        if rows is not None:
            # Without master copies, this rank's own rows are up to date.
            skipped = None if has_master else self._reduction.shard.rank
            self._packing.unpack(rows, wholes, skipped=skipped)
        elif has_master:
            foreach_copy_(wholes, [part.local for part in self.parts])


class Packing:
    """Layout of several tensors in one tensor [ranks, width].

    Each tensor is split by rows over the ranks. Ranks with fewer rows than rank 0 have padding,
    which is never read. The rows of a single rank have the same layout in a tensor [1, width].
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self._widths = [largest_shard(shape[0], ranks) * shape[1:].numel() for shape in shapes]
        self._shape = (ranks, sum(self._widths))

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a new tensor [ranks, width] on the device of `like`."""
        return like.new_empty(self._shape, dtype=dtype)

    def pack(self, tensors: Sequence[Tensor], packed: Tensor) -> None:
        """Copies rows into `packed`: [ranks, width] of all ranks, or [1, width] of one rank."""
        ranks = len(packed)
        if [each.numel() for each in tensors] == [ranks * width for width in self._widths]:
            # No tensor has padding: one call takes less CPU time than a copy of each tensor.
            torch.cat([each.reshape(ranks, -1) for each in tensors], dim=1, out=packed)
            return
        for part, place in self._places(tensors, packed):
            place.copy_(part)

    def unpack(
        self,
        packed: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float = 1.0,
        skipped: int | None = None,
    ) -> None:
        """Copies rows back from `packed`, times `scale`, except those of the rank `skipped`."""
        for part, place in self._places(tensors, packed, skipped):
            torch.mul(place, scale, out=part)

    def _places(
        self, tensors: Sequence[Tensor], packed: Tensor, skipped: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields slices of each tensor [rows, ...] with their positions in `packed`.

        Ranks with a full share of rows form one slice, or two slices around `skipped`. The rank
        with fewer rows follows. With hundreds of ranks, one copy per rank would take seconds.
        """
        for tensor, columns in zip(tensors, packed.split(self._widths, dim=1), strict=True):
            places = columns.unflatten(1, (-1, *tensor.shape[1:]))  # [ranks, rows of a share, ...]
            share = places.shape[1]
            full_ranks, rest = divmod(len(tensor), share)
            ranges = [(0, full_ranks)]
            if skipped is not None:
                ranges = [(0, min(skipped, full_ranks)), (skipped + 1, full_ranks)]
            for start, stop in ranges:
                if start < stop:
                    rows = tensor[start * share : stop * share]
                    yield rows.unflatten(0, (-1, share)), places[start:stop]
            if rest and skipped != full_ranks:
                yield tensor[full_ranks * share :], places[full_ranks, :rest]


def start_row_reduction(rows: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Starts the reduce-scatter of `rows` [ranks, width]. Call the result for this rank's row."""
    if dist.get_backend(axis.group) != "gloo":  # [Note: gloo]
        pending = start_reduce_scatter(rows, axis, 0)
        return lambda: pending()[0]
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=axis.group, async_op=True)

    def add() -> Tensor:
        total, *others = after(work, received, rows)
        for other in others:
            total += other
        return total

    return add


def start_row_gather(rows: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Starts the all-gather of `rows` [ranks, width] in place, from this rank's own row. Call the
    result to wait for the rows and get them."""
    if dist.get_backend(axis.group) != "gloo":  # [Note: gloo]
        own = rows[axis.rank]
        work = all_gather_single(rows.flatten(), own, group=axis.group, async_op=True)
        return partial(after, work, rows)
    works = []
    for rank, row in enumerate(rows):
        works.append(dist.broadcast(row, group=axis.group, group_src=rank, async_op=True))

    def finish() -> Tensor:
        for work in works:
            after(work, rows)
        return rows

    return finish

"""NO_SHARD and SHARD_OPTIMIZER (ZeRO-0 and ZeRO-1): every data rank has whole parameters and whole gradients.

[Note: why not DistributedDataParallel] torch has both strategies, and they are written here for the sake of fused
gradients (`layers.parameter`): a backward of the layers adds a weight's gradient by the matrix product itself, also in
a wider dtype and also in the second half of a split backward, and autograd's hooks on parameters, on which
DistributedDataParallel is built, never hear of it. `python -m parallel3d.tools.bench data` measured the price on two
CPU cores (CPU seconds of a step, ours / torch's): NO_SHARD against DistributedDataParallel 0.94 where overhead
dominates and 1.00 where matrix products do; SHARD_OPTIMIZER against ZeroRedundancyOptimizer 0.92 and 1.06.

Gradients lie in buckets of whole units. A bucket is reduced as soon as the last backward of a step has gone through its
units, while those before them are still computed. That is noticed at a unit's input: autograd differentiates what was
made last first, so that the gradient of a module's input is there only when everything in the module has been
differentiated. It holds for fused gradients and for activation recompute too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from parallel3d.layers.parameter import like_parameter, local_tensor
from parallel3d.sharding.buckets import Bucket, ReplicatedParameter, StepInBackwardBucket
from parallel3d.sharding.bytes import bucket_borders
from parallel3d.sharding.optimizer_parts import OptimizerPart, own_rows
from parallel3d.sharding.settings import DataAxes, Dtypes, ShardingOptions
from parallel3d.sharding.units import CommunicationUnit, ParameterUse
from parallel3d.torch_private import is_in_backward

_UNDER_WAY = 2  # buckets


class ReplicatedPart:
    """The part of a replicated parameter that the optimizer steps: this rank's rows with `split`, otherwise all."""

    def __init__(self, replicated: ReplicatedParameter, bucket: Bucket, axes: DataAxes, *, split: bool) -> None:
        self._replicated, self._bucket, self._axes = replicated, bucket, axes
        self._split = split and axes.shard.size > 1
        self.local = replicated.local
        self.repeated_over = frozenset({"dp_replicate"} if self._split else {"dp_replicate", "dp_shard"})

    def sync_views(self) -> None:
        self._bucket.attach_grad(self._replicated)

    def distributed(self, local: Tensor) -> Tensor:
        parameter = self._replicated.parameter
        if not self._split:
            return like_parameter(parameter, local)
        placements: tuple[Placement, ...]
        if not isinstance(parameter, DTensor):
            mesh, placements = self._axes.mesh["dp_shard"], (Shard(0),)
        else:
            mesh, placements = _joined(parameter.device_mesh, self._axes.mesh), (*parameter.placements, Shard(0))
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def when_complete(self, act: Callable[[], None]) -> None:
        self._bucket.when_complete(self._replicated, act)

    @torch.no_grad()
    def initialize(self, values: Tensor) -> None:
        local_tensor(self._replicated.parameter).copy_(values)
        if self._replicated.has_master:
            shards = self._axes.shard
            self.local.copy_(own_rows(values, shards.rank, shards.size) if self._split else values)


def _joined(tp: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of tp, then dp_shard: rows are cut over tp first, and a tp rank's rows over dp_shard."""
    both = mesh["dp_shard", "tp"]
    groups = [both.get_group("tp"), both.get_group("dp_shard")]
    ranks = both.mesh.t().contiguous()
    return DeviceMesh.from_group(groups, tp.device_type, mesh=ranks, mesh_dim_names=("tp", "dp_shard"))


class ReplicatedData:
    """The model over the data ranks for NO_SHARD, and with `split` for SHARD_OPTIMIZER (see `ShardedData`)."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[CommunicationUnit],
        axes: DataAxes,
        dtypes: Dtypes,
        options: ShardingOptions,
        *,
        split: bool,
        average: bool,
    ) -> None:
        self._units, self._axes, self._dtypes, self._options = units, axes, dtypes, options
        self._split, self._average = split, average
        self._parts: dict[int, ReplicatedPart] = {}
        self._buckets: list[Bucket] = []
        self._last = True  # whether the backward under way is the step's last
        self._is_reduced = False
        if dtypes.compute != dtypes.master:
            model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        parameters = [uses for unit in units for uses in unit.parameters]
        if any(uses[0].parameter.is_meta for uses in parameters):
            for uses in parameters:
                _replace(uses, uses[0].parameter.to(dtypes.compute))
        else:
            self.allocate()

    def allocate(self) -> None:
        """Makes the gradients' memory and the master copies. It is called once a model that was on the meta device has
        got memory; for any other model it has already been done."""
        least = int(self._options.bucket_mib * 2**20) // self._dtypes.master.itemsize
        borders = bucket_borders([unit.numel for unit in self._units], least)
        grouped = [[self._units[index] for index in border] for border in borders]
        sizes = [sum(unit.numel for unit in units) for units in grouped]
        for index, (units, memory) in enumerate(zip(grouped, self._memories(sizes), strict=True)):
            start, members = 0, []
            for uses in (uses for unit in units for uses in unit.parameters):
                member, start = self._replicate(uses, memory, start)
                members.append(member)
            bucket = self._bucket(members, memory, index)
            for member in members:
                self._parts[id(member.parameter)] = ReplicatedPart(member, bucket, self._axes, split=self._split)
            self._buckets.append(bucket)
        self._progress = _BackwardProgress(self._buckets)
        if self._axes.every.size > 1 and not self._options.step_in_backward:
            for index, units in enumerate(grouped):
                if all(unit.modules for unit in units):  # a bucket with what no module holds is reduced at the end
                    for module in (module for unit in units for module in unit.modules):
                        module.register_forward_pre_hook(self._watcher(index), with_kwargs=True)

    def _memories(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Makes the memory for gradients: one piece for all buckets, or a piece for each that it can give back."""
        dtype, device = self._dtypes.master, self._units[0].parameters[0][0].parameter.device
        if self._options.step_in_backward:
            return (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        return iter(torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes))

    def _bucket(self, members: Sequence[ReplicatedParameter], memory: Tensor, index: int) -> Bucket:
        split, dtype, average = self._split, self._dtypes.reduce, self._average
        if not self._options.step_in_backward:
            return Bucket(members, memory, self._axes, split=split, reduce_dtype=dtype, average=average)
        return StepInBackwardBucket(
            members,
            memory,
            self._axes,
            split=split,
            reduce_dtype=dtype,
            average=average,
            filled=lambda: self._progress.filled(index),
        )

    def _replicate(self, uses: tuple[ParameterUse, ...], memory: Tensor, start: int) -> tuple[ReplicatedParameter, int]:
        """Gives a parameter its dtypes and its gradient in `memory` from `start` on; returns where the gradient
        ends."""
        parameter = uses[0].parameter
        shards, split = self._axes.shard, self._split and self._axes.shard.size > 1
        if split and parameter.ndim == 0:
            raise ValueError(f"{uses[0].attribute}: a scalar has no rows to split; give it the shape [1]")
        value = local_tensor(parameter.detach())
        end = start + value.numel()
        gradient = memory[start:end].view(value.shape)
        if parameter.dtype != self._dtypes.compute:
            _replace(uses, parameter.to(self._dtypes.compute))
            parameter = uses[0].parameter
        own, own_gradient = value, gradient
        if split:
            own, own_gradient = (own_rows(each, shards.rank, shards.size) for each in (value, gradient))
        if parameter.dtype != self._dtypes.master:
            own = own.to(self._dtypes.master, copy=True)
        elif value.dtype != parameter.dtype:  # the parameter was replaced by one of the master's own dtype
            own = local_tensor(parameter.detach())
        local = nn.Parameter(own)
        if self._options.step_in_backward:
            return ReplicatedParameter(parameter, local, gradient, own_gradient, attached=None), end
        return ReplicatedParameter.of(parameter, local, gradient, own_gradient), end

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        return self._parts[id(getattr(module, attribute))]

    def before_backward(self, last: bool) -> None:
        self._last = last

    def after_weights(self, last: bool) -> None:
        if last:
            self._progress.start_all()

    def finish_gradients(self) -> None:
        """Waits until gradients are summed over the data ranks. Raises RuntimeError if they are not in buckets, or were
        reduced already."""
        if not all(each.is_in_place for bucket in self._buckets for each in bucket.parameters):
            raise RuntimeError(
                "a gradient is not where it is reduced: clear gradients by clear_gradients() of what shard() gave, and "
                "not by the model's zero_grad()"
            )
        if self._is_reduced:
            raise RuntimeError("gradients were reduced twice: call clear_gradients() of what shard() gave in each step")
        self._progress.finish()
        self._is_reduced = True

    def clear_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.clear()
        self._is_reduced = False

    def publish(self) -> None:
        """Gives every rank the parameters that the others have stepped, one bucket under way while the next starts."""
        finish = None
        for bucket in self._buckets:
            upcoming = bucket.start_publish()
            if finish is not None:
                finish()
            finish = upcoming
        if finish is not None:
            finish()

    def free_gathered(self) -> None:
        """Does nothing: no parameter is gathered."""

    def _watcher(self, index: int) -> Any:
        """Makes the hook that notices a module's forward, and by the gradient of its input its backward."""

        @torch.compiler.disable
        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A forward that a checkpoint computes again is left out: its graph is not differentiated by itself.
            if not torch.is_grad_enabled() or is_in_backward():
                return None
            self._progress.opened(index)
            for at, x in enumerate(args):
                if isinstance(x, Tensor) and x.requires_grad:
                    # The hook of a leaf would be called as soon as the leaf's own gradient is there.
                    y = x.view_as(x) if x.is_leaf else x
                    y.register_hook(lambda _: self._progress.closed(index, last=self._last))
                    return None if y is x else ((*args[:at], y, *args[at + 1 :]), kwargs)
            return None  # the unit is never closed, and its bucket is reduced when the backward has ended

        return before_forward

    def _cast_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def cast(x: Any) -> Any:
            return x.to(self._dtypes.compute) if isinstance(x, Tensor) and x.is_floating_point() else x

        return tuple(cast(x) for x in args), {name: cast(x) for name, x in kwargs.items()}


class _BackwardProgress:
    """Tells which buckets are done in the backward under way, and reduces them in one order on all ranks, the last
    bucket first."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._reset()

    def _reset(self) -> None:
        self._open = [0] * len(self._buckets)  # forwards of a bucket's units that have had no backward
        self._is_ready = [False] * len(self._buckets)
        self._next = len(self._buckets) - 1

    def opened(self, index: int) -> None:
        self._open[index] += 1

    def closed(self, index: int, *, last: bool) -> None:
        self._open[index] -= 1
        if last and self._open[index] == 0:
            self.filled(index)

    def filled(self, index: int) -> None:
        self._is_ready[index] = True
        while self._next >= 0 and self._is_ready[self._next]:
            self._start_next()

    def start_all(self) -> None:
        while self._next >= 0:
            self._start_next()

    def finish(self) -> None:
        self.start_all()
        for bucket in reversed(self._buckets):
            bucket.finish_reduction()
        self._reset()

    def _start_next(self) -> None:
        """Starts to reduce a bucket. At most _UNDER_WAY are on their way at once, because what is sent may be a
        copy."""
        oldest = self._next + _UNDER_WAY
        if oldest < len(self._buckets):
            self._buckets[oldest].finish_reduction()
        self._buckets[self._next].start_reduction()
        self._next -= 1


def _replace(uses: Sequence[ParameterUse], tensor: Tensor) -> None:
    """Puts a new parameter in all the places that use one."""
    old = uses[0].parameter
    new = nn.Parameter(tensor.detach(), requires_grad=old.requires_grad)
    for use in uses:
        setattr(use.module, use.attribute, new)

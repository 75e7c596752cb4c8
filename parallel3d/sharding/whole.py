"""NO_SHARD and SHARD_OPTIMIZER: every data rank has whole parameters and whole gradients.

Gradients lie in buckets of whole units. A bucket is reduced as soon as the last backward of a step has gone through its
units, while those before them are still computed. That is noticed at a unit's input: the gradient of what a module took
is there only when everything in the module has been differentiated, because autograd does what was made last first; so
it holds for gradients that a backward adds itself, of which autograd's hooks on parameters never hear, and for
activation recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from parallel3d.layers.parameter import like_parameter, local_tensor
from parallel3d.sharding.bucket import Bucket, DataAxes, ReplicatedParameter
from parallel3d.sharding.dtypes import Dtypes
from parallel3d.sharding.formulas import bucket_borders
from parallel3d.sharding.parts import OptimizerPart, own_rows
from parallel3d.sharding.transient import StepInBackwardBucket
from parallel3d.sharding.units import CommunicationUnit, ParameterUse
from parallel3d.torch_private import is_in_backward

_UNDER_WAY = 2  # buckets


class ReplicatedPart:
    """The part of a parameter that is whole here. `split`: the optimizer has this rank's rows of it alone."""

    def __init__(
        self, whole: ReplicatedParameter, bucket: Bucket, axes: DataAxes, mesh: DeviceMesh, *, split: bool
    ) -> None:
        self._whole, self._bucket = whole, bucket
        self._axes, self._mesh, self._split = axes, mesh, split and axes.shard.size > 1
        self.local = whole.local
        self.repeated_over = frozenset({"dp_replicate"} if self._split else {"dp_replicate", "dp_shard"})

    def sync_views(self) -> None:
        self._bucket.attach_grad(self._whole)

    def distributed(self, local: Tensor) -> Tensor:
        if not self._split:
            return like_parameter(self._whole.parameter, local)
        parameter = self._whole.parameter
        placements: tuple[Placement, ...]
        if not isinstance(parameter, DTensor):
            mesh, placements = self._mesh["dp_shard"], (Shard(0),)
        else:
            mesh, placements = _joined(parameter.device_mesh, self._mesh), (*parameter.placements, Shard(0))
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def when_complete(self, act: Callable[[], None]) -> None:
        self._bucket.when_complete(self._whole, act)

    @torch.no_grad()
    def initialize(self, whole: Tensor) -> None:
        local_tensor(self._whole.parameter).copy_(whole)
        if self._whole.has_master:
            shards = self._axes.shard
            self.local.copy_(own_rows(whole, shards.rank, shards.size) if self._split else whole)


def _joined(tp: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of tp, then dp_shard: rows are cut over tp first, and what a tp rank has over dp_shard."""
    both = mesh["dp_shard", "tp"]
    groups = [both.get_group("tp"), both.get_group("dp_shard")]
    ranks = both.mesh.t().contiguous()
    return DeviceMesh.from_group(groups, tp.device_type, mesh=ranks, mesh_dim_names=("tp", "dp_shard"))


class ReplicatedData:
    """What `shard` gives for NO_SHARD and SHARD_OPTIMIZER."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[CommunicationUnit],
        axes: DataAxes,
        mesh: DeviceMesh,
        *,
        split: bool,
        dtypes: Dtypes,
        average: bool,
        bucket_bytes: int,
        transient: bool,
    ) -> None:
        self._units, self._axes, self._mesh, self._transient = units, axes, mesh, transient
        self._split, self._dtypes, self._average, self._bucket_bytes = split, dtypes, average, bucket_bytes
        self._parts: dict[int, ReplicatedPart] = {}
        self._buckets: list[Bucket] = []
        self._last = True  # whether the backward under way is the step's last
        self._is_reduced = False
        if dtypes.compute != dtypes.master:
            model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        slots = [places for unit in units for places in unit.slots]
        if any(places[0].parameter.is_meta for places in slots):
            for places in slots:
                _replace(places, places[0].parameter.to(dtypes.compute))
        else:
            self.allocate()

    def allocate(self) -> None:
        """Makes the gradients' memory, and the master copies. Call it where a model that was on the meta device has
        got memory; else it is done already."""
        least = self._bucket_bytes // self._dtypes.master.itemsize
        borders = bucket_borders([unit.numel for unit in self._units], least)
        grouped = [[self._units[index] for index in border] for border in borders]
        sizes = [sum(unit.numel for unit in units) for units in grouped]
        memories = self._memories(sizes)
        for index, (units, memory) in enumerate(zip(grouped, memories, strict=True)):
            start, wholes = 0, []
            for places in (places for unit in units for places in unit.slots):
                whole, start = self._whole(places, memory, start)
                wholes.append(whole)
            bucket = self._bucket(wholes, memory, index)
            for whole in wholes:
                self._parts[id(whole.parameter)] = ReplicatedPart(
                    whole, bucket, self._axes, self._mesh, split=self._split
                )
            self._buckets.append(bucket)
        self._progress = _Progress(self._buckets)
        for index, units in enumerate(grouped):
            if self._axes.every.size > 1 and all(unit.modules for unit in units) and not self._transient:
                self._watch(index, units)  # the others are reduced when all is done

    def _memories(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """For gradients: one piece of memory for all buckets, or one for each that they can give back."""
        dtype, device = self._dtypes.master, self._units[0].slots[0][0].parameter.device
        if self._transient:
            return (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        return iter(torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes))

    def _bucket(self, wholes: Sequence[ReplicatedParameter], memory: Tensor, index: int) -> Bucket:
        split, dtype, average = self._split, self._dtypes.reduce, self._average
        if not self._transient:
            return Bucket(wholes, memory, self._axes, split=split, reduce_dtype=dtype, average=average)
        return StepInBackwardBucket(
            wholes,
            memory,
            self._axes,
            split=split,
            reduce_dtype=dtype,
            average=average,
            filled=lambda: self._progress.filled(index),
        )

    def _whole(self, places: tuple[ParameterUse, ...], memory: Tensor, start: int) -> tuple[ReplicatedParameter, int]:
        parameter = places[0].parameter
        shards, split = self._axes.shard, self._split and self._axes.shard.size > 1
        if split and parameter.ndim == 0:
            raise ValueError(f"{places[0].attribute}: a scalar has no rows to split; give it the shape [1]")
        value = local_tensor(parameter.detach())
        end = start + value.numel()
        gradient = memory[start:end].view(value.shape)
        if parameter.dtype != self._dtypes.compute:
            _replace(places, parameter.to(self._dtypes.compute))
            parameter = places[0].parameter
        own, own_gradient = value, gradient
        if split:
            own, own_gradient = (own_rows(each, shards.rank, shards.size) for each in (value, gradient))
        if parameter.dtype != self._dtypes.master:
            own = own.to(self._dtypes.master, copy=True)
        elif value.dtype != parameter.dtype:  # it was replaced, in the master's own dtype
            own = local_tensor(parameter.detach())
        local = nn.Parameter(own)
        if self._transient:
            return ReplicatedParameter(parameter, local, gradient, own_gradient, shown=None), end
        return ReplicatedParameter.of(parameter, local, gradient, own_gradient), end

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        """Of the parameter that `module` holds as `attribute`."""
        return self._parts[id(getattr(module, attribute))]

    def before_backward(self, last: bool) -> None:
        """Tells of each backward whether it is the step's last. Without it, each is."""
        self._last = last

    def after_weights(self, last: bool) -> None:
        """Tells that the weights' half of a split backward is done, and whether it is the step's last."""
        if last:
            self._progress.start_all()

    def finish_gradients(self) -> None:
        """Waits until gradients are summed over the data ranks. Raises RuntimeError where they are not in buckets."""
        if not all(whole.is_in_place for bucket in self._buckets for whole in bucket.wholes):
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
        """After the optimizer's step: every rank gets what the others have stepped."""
        finish = None
        for bucket in self._buckets:
            upcoming = bucket.start_publish()
            if finish is not None:
                finish()
            finish = upcoming
        if finish is not None:
            finish()

    def free_gathered(self) -> None:
        """Nothing is gathered but what stays."""

    def _watch(self, index: int, units: Sequence[CommunicationUnit]) -> None:
        for unit in units:
            for module in unit.modules:
                module.register_forward_pre_hook(self._watcher(index), with_kwargs=True)

    def _watcher(self, index: int) -> Any:
        @torch.compiler.disable
        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Not where a checkpoint computes a forward again: its graph is not differentiated by itself.
            if not torch.is_grad_enabled() or is_in_backward():
                return None
            self._progress.opened(index)
            for at, x in enumerate(args):
                if isinstance(x, Tensor) and x.requires_grad:
                    # The hook of a leaf would be called as soon as the leaf's own gradient is there.
                    y = x.view_as(x) if x.is_leaf else x
                    y.register_hook(lambda _: self._progress.closed(index, last=self._last))
                    return None if y is x else ((*args[:at], y, *args[at + 1 :]), kwargs)
            return None  # never closed: reduced when all is done

        return before_forward

    def _cast_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def cast(x: Any) -> Any:
            return x.to(self._dtypes.compute) if isinstance(x, Tensor) and x.is_floating_point() else x

        return tuple(cast(x) for x in args), {name: cast(x) for name, x in kwargs.items()}


class _Progress:
    """Which buckets are done in the backward under way. They start in one order on all ranks, the last first."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._open = [0] * len(buckets)  # forwards of a bucket's units that have had no backward
        self._is_ready = [False] * len(buckets)
        self._next = len(buckets) - 1

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
        self._open = [0] * len(self._buckets)
        self._is_ready = [False] * len(self._buckets)
        self._next = len(self._buckets) - 1

    def _start_next(self) -> None:
        """At most _UNDER_WAY are on their way at once: what is sent may be a copy."""
        oldest = self._next + _UNDER_WAY
        if oldest < len(self._buckets):
            self._buckets[oldest].finish_reduction()
        self._buckets[self._next].start_reduction()
        self._next -= 1


def _replace(places: Sequence[ParameterUse], tensor: Tensor) -> None:
    """Another parameter in all the places of one."""
    old = places[0].parameter
    new = nn.Parameter(tensor.detach(), requires_grad=old.requires_grad)
    for place in places:
        setattr(place.module, place.attribute, new)

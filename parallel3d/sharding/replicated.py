"""NO_SHARD and SHARD_OPTIMIZER (ZeRO-0 and ZeRO-1): full parameters and gradients on every DP rank.

[Note: why not DistributedDataParallel] torch has both strategies, but builds them on autograd hooks
of parameters. Those do not fire with fused gradients (`layers.weight_gradients`). Matmuls
accumulate those directly, possibly in a wider dtype or in the second half of a split backward pass.
docs/reference/sharding.md compares step times.

Gradients live in buckets of complete units. A bucket is reduced as soon as the last backward pass
of a step has left its units, overlapped with the backward pass of earlier units. A hook on a unit's
input detects this, because autograd computes the input gradient of a module last. This also holds
for fused gradients and activation recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.config.sharding_strategies import usual_bucket_mib
from parallel3d.sharding.buckets import Bucket
from parallel3d.sharding.optimizer_parts import OptimizerPart, ShardedData
from parallel3d.sharding.settings import Reduction, ShardingOptions
from parallel3d.sharding.units import CommunicationUnit, Wrap, units_of
from parallel3d.torch_private import is_in_backward, tree_map
from parallel3d.watch.step_clock import timed_as

_UNDER_WAY = 2  # Buckets reduced at a time. This limits memory, because each may need a copy.


class ReplicatedData(ShardedData):
    """Data-parallel handle for NO_SHARD, or SHARD_OPTIMIZER if `reduction.split`.

    All ranks reduce the buckets in the same order, last bucket first.
    """

    def __init__(
        self,
        model: nn.Module,
        wrap: Wrap,
        reduction: Reduction,
        options: ShardingOptions,
        of_experts: Reduction,
    ) -> None:
        super().__init__(model)
        self._wrap = wrap
        self._reduction = reduction
        self._of_experts = of_experts
        self._options = options
        self._publishes_late = options.publish_in_forward and reduction.split
        self._last = True  # True if the current backward pass is the last of the step.
        self._published = 0  # Number of buckets whose parameters are up to date.
        # Function that waits for the next bucket's rows. None: all have arrived.
        self._arriving: Callable[[], Tensor | None] | None = None
        self._is_reduced = False
        compute = reduction.dtypes.compute
        if compute != reduction.dtypes.master:
            model.register_forward_pre_hook(partial(_cast_inputs, compute), with_kwargs=True)
        model.register_state_dict_pre_hook(lambda *args: self.finish_publish())
        if any(parameter.is_meta for parameter in model.parameters()):
            _cast_parameters(model, compute)
        else:
            self.allocate()

    def allocate(self) -> None:
        """Allocates gradient memory and master copies.

        The constructor calls it unless the model is on the meta device.
        """
        options = self._options
        reduction = self._reduction
        dtypes = reduction.dtypes
        before = _cast_parameters(self._model, dtypes.compute)
        units = units_of(self._model, self._wrap)
        device = units[0].parameters[0].device
        usual = usual_bucket_mib(on_gpu=device.type != "cpu")
        least = int((options.bucket_mib or usual) * 2**20) // dtypes.master.itemsize
        groups: list[list[CommunicationUnit]] = []
        sizes: list[int] = []
        for unit in reversed(units):
            is_other = bool(groups) and groups[0][0].has_experts != unit.has_experts
            if not sizes or sizes[0] >= least or is_other:
                groups.insert(0, [])
                sizes.insert(0, 0)
            groups[0].insert(0, unit)
            sizes[0] += unit.numel
        memory = torch.zeros(sum(sizes), dtype=dtypes.master, device=device).split(sizes)
        self._buckets: list[Bucket] = []
        for index, group in enumerate(groups):
            parameters = [*chain.from_iterable(unit.parameters for unit in group)]
            over = self._of_experts if group[0].has_experts else reduction
            self._buckets.append(Bucket(parameters, before, memory[index], over))
            if reduction.every.size > 1:
                self._add_hooks(index, group)
        parts = chain.from_iterable(bucket.parts for bucket in self._buckets)
        self._parts = {id(part.parameter): part for part in parts}
        self._begin()

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        return self._parts[id(getattr(module, attribute))]

    def before_backward(self, last: bool) -> None:
        self.finish_publish()
        self._last = last

    def after_weights(self, last: bool) -> None:
        while last and self._next >= 0:
            self._start_next()

    def finish_gradients(self) -> None:
        """Waits until gradients are reduced over the DP ranks.

        Raises RuntimeError if gradients are not in buckets or were already reduced.
        """
        self.finish_publish()  # For units that no forward pass used.
        moved = [part for part in self._parts.values() if part.parameter.grad is not part.attached]
        if moved or self._is_reduced:
            raise RuntimeError(
                "finish_gradients(): gradients are outside of their buckets or already reduced; "
                "call clear_gradients() of the result of shard() in each step, not "
                "model.zero_grad()"
            )
        self.after_weights(last=True)
        for bucket in reversed(self._buckets):
            bucket.finish_reduction()
        self._begin()
        self._is_reduced = True

    def clear_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.memory.zero_()
        self._is_reduced = False

    @torch.no_grad()
    def publish(self) -> None:
        """Starts to all-gather the parameters that the optimizer updated on each rank.

        With `publish_in_forward`, the first bucket is then in flight, and a unit's forward pass
        waits for its bucket. Otherwise this call waits for all.
        """
        if self._arriving is not None:  # Discards outdated values of an earlier call.
            self._arriving()
        self._published = 0
        self._arriving = self._buckets[0].start_publish()
        if not self._publishes_late:
            self.finish_publish()

    def finish_publish(self) -> None:
        self._publish_until(len(self._buckets))

    @torch.compiler.disable
    @timed_as("dp")
    @torch.no_grad()
    def _publish_until(self, end: int) -> None:
        """Waits until the first `end` buckets have received their values.

        Buckets are sent in the same order on all ranks, and the next one is always in flight.
        """
        while self._arriving is not None and self._published < end:
            bucket = self._buckets[self._published]
            rows = self._arriving()
            self._published += 1
            rest = self._buckets[self._published :]
            self._arriving = rest[0].start_publish() if rest else None
            bucket.finish_publish(rows)

    def _begin(self) -> None:
        # Number of forward passes of each bucket that have had no backward pass yet.
        self._open = [0] * len(self._buckets)
        self._ready: set[int] = set()  # Buckets with complete gradients.
        self._next = len(self._buckets) - 1  # Next bucket to reduce.

    def _start_next(self) -> None:
        oldest = self._next + _UNDER_WAY
        if oldest < len(self._buckets):
            self._buckets[oldest].finish_reduction()
        self._buckets[self._next].start_reduction()
        self._next -= 1

    def _add_hooks(self, index: int, units: Sequence[CommunicationUnit]) -> None:
        """Adds hooks that wait for parameters before forward passes and track backward passes.

        A bucket with parameters that belong to no unit is reduced after the backward pass.
        """
        for module in chain.from_iterable(unit.modules or (self._model,) for unit in units):
            if self._publishes_late:
                module.register_forward_pre_hook(lambda *args: self._publish_until(index + 1))
            if all(unit.modules for unit in units):
                module.register_forward_pre_hook(partial(self._watch, index), with_kwargs=True)

    @torch.compiler.disable
    def _watch(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Counts a unit's forward pass and hooks its first input that requires a gradient.

        The hook detects the end of the backward pass. Without such an input, the bucket is reduced
        after the full backward pass.
        """
        # Skip recomputed forward passes. They belong to a backward pass that is already counted.
        if not torch.is_grad_enabled() or is_in_backward():
            return None
        self._open[index] += 1
        for at, x in enumerate(args):
            if isinstance(x, Tensor) and x.requires_grad:
                # The hook of a leaf would fire before the backward pass of the unit is complete.
                y = x.view_as(x) if x.is_leaf else x
                y.register_hook(partial(self._after_backward, index))
                return (*args[:at], y, *args[at + 1 :]), kwargs
        return None

    def _after_backward(self, index: int, grad: Tensor) -> None:
        """Starts the reduction of buckets that are complete after a unit's backward pass."""
        self._open[index] -= 1
        if self._last and self._open[index] == 0:
            self._ready.add(index)
            while self._next in self._ready:
                self._start_next()


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Casts parameters to `dtype` in all modules that use them.

    Returns the original tensor of each parameter that was cast.
    """
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if old.dtype != dtype:
                if old not in new:
                    new[old] = nn.Parameter(old.detach().to(dtype), old.requires_grad)
                setattr(module, name, new[old])
    return {parameter: old.detach() for old, parameter in new.items()}


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(cast, (args, kwargs))

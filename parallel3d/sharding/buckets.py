"""One piece of memory for the gradients of many parameters, and what is sent of it.

Gradients are views into a bucket (`.grad`, and `main_grad` for those that a backward adds itself), so that a microbatch
adds where the collective will read, one call clears a bucket, and no copy stands between a backward and its all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.layers.parameter import like_parameter, local_tensor
from parallel3d.mesh import Axis
from parallel3d.sharding.exchange import Packing, start_row_gather, start_row_reduction, wait
from parallel3d.sharding.settings import DataAxes


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter that is whole on this rank, its gradient, and `local`, the part of it that the optimizer steps."""

    parameter: nn.Parameter
    local: nn.Parameter  # this rank's rows of the parameter itself, or of its master copy
    gradient: Tensor  # the parameter's, a view into a bucket
    own_gradient: Tensor  # the gradient of `local`, a view into `gradient`
    attached: Tensor | None  # `gradient` as the parameter's `.grad`; None if its dtype is another than the parameter's

    @classmethod
    def of(
        cls, parameter: nn.Parameter, local: nn.Parameter, gradient: Tensor, own_gradient: Tensor
    ) -> ReplicatedParameter:
        """Lets every backward of `parameter` add to `gradient`."""
        attached = like_parameter(parameter, gradient) if parameter.dtype == gradient.dtype else None
        replicated = cls(parameter, local, gradient, own_gradient, attached)
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        if attached is None:
            parameter.register_post_accumulate_grad_hook(lambda _: replicated._take_gradient())
        else:
            parameter.grad = attached
        return replicated

    @property
    def has_master(self) -> bool:
        return self.local.dtype != self.parameter.dtype

    @property
    def is_in_place(self) -> bool:
        """Whether the next backward adds to the bucket."""
        return self.parameter.grad is self.attached

    def _take_gradient(self) -> None:
        """Moves the gradient that autograd has made to the bucket."""
        grad = self.parameter.grad
        if grad is not None:
            self.gradient.add_(local_tensor(grad))
            self.parameter.grad = None


class Bucket:
    """The gradients of `parameters`, which lie in `memory` one after the other.

    With `split` each rank makes its rows of the sum alone (a reduce-scatter over dp_shard, then an all-reduce of the
    rows over dp_replicate); otherwise every rank makes all of the sum (one all-reduce). Gradients are sent in
    `reduce_dtype`. With `average` the sum is divided by the number of data ranks.
    """

    def __init__(
        self,
        parameters: Sequence[ReplicatedParameter],
        memory: Tensor,
        axes: DataAxes,
        *,
        split: bool,
        reduce_dtype: torch.dtype,
        average: bool,
    ) -> None:
        self.parameters = parameters
        self.memory = memory
        self._axes = axes
        self._split = split and axes.shard.size > 1
        self._reduce_dtype = reduce_dtype
        self._scale = 1.0 / axes.every.size if average else 1.0
        self._finish: Callable[[], None] | None = None
        if self._split:
            self._packing = Packing([each.gradient.shape for each in parameters], axes.shard.size)

    def attach_grad(self, replicated: ReplicatedParameter) -> None:
        """Puts the gradient where the optimizer reads it."""
        replicated.local.grad = replicated.own_gradient

    def when_complete(self, replicated: ReplicatedParameter, act: Callable[[], None]) -> None:
        """Raises RuntimeError: this bucket keeps gradients until they are cleared (see `OptimizerPart`)."""
        raise RuntimeError(
            "gradients are kept until clear_gradients(): call shard() with "
            "options=ShardingOptions(step_in_backward=True)"
        )

    def clear(self) -> None:
        self.memory.zero_()

    def start_reduction(self) -> None:
        """Starts to sum the gradients over the data ranks."""
        if self._split:
            self._start_scatter()
        else:
            self._start_all_reduce(self.memory, self._axes.every)

    def finish_reduction(self) -> None:
        """Waits until `own_gradient` of every parameter is the sum."""
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _start_all_reduce(self, total: Tensor, axis: Axis) -> None:
        if axis.size == 1:
            return
        sent = total.to(self._reduce_dtype)
        work = dist.all_reduce(sent, group=axis.group, async_op=True)

        def finish() -> None:
            wait(work)
            if sent is not total:
                total.copy_(sent)
            self._divide(total)

        self._finish = finish

    def _start_scatter(self) -> None:
        sent = self._packing.pack([each.gradient for each in self.parameters], self._reduce_dtype)
        received = start_row_reduction(sent, self._axes.shard)

        def finish() -> None:
            nonlocal sent
            own = received()
            del sent
            if self._axes.replicate.size > 1:
                dist.all_reduce(own, group=self._axes.replicate.group)
            self._divide(own)
            self._packing.unpack_own(own, [each.own_gradient for each in self.parameters])

        self._finish = finish

    def _divide(self, total: Tensor) -> None:
        if self._scale != 1.0:
            total.mul_(self._scale)

    @torch.no_grad()
    def start_publish(self) -> Callable[[], None]:
        """Starts to give every rank the parameters that the optimizer has stepped; returns a function that waits for
        them."""
        if not self._split:
            for each in self.parameters:
                if each.has_master:
                    local_tensor(each.parameter).copy_(each.local)
            return lambda: None
        sent = self._packing.pack_own([each.local for each in self.parameters], self.parameters[0].parameter.dtype)
        received = start_row_gather(sent, self._axes.shard)

        def finish() -> None:
            with torch.no_grad():
                self._packing.unpack(received(), [local_tensor(each.parameter) for each in self.parameters])

        return finish


class StepInBackwardBucket(Bucket):
    """A bucket whose memory exists only while a backward goes through its units, for an optimizer that steps in the
    backward. It gets its memory with the first gradient of a step, and gives it back after the function that
    `when_complete` was given for each parameter. There is one backward a step, and its gradients go through autograd.

    `filled` is called when the last gradient has come.
    """

    def __init__(
        self,
        parameters: Sequence[ReplicatedParameter],
        memory: Tensor,
        axes: DataAxes,
        *,
        split: bool,
        reduce_dtype: torch.dtype,
        average: bool,
        filled: Callable[[], None],
    ) -> None:
        super().__init__(parameters, memory, axes, split=split, reduce_dtype=reduce_dtype, average=average)
        self._storage, self._nbytes = memory.untyped_storage(), memory.nbytes
        self._filled = filled
        self._taken: set[int] = set()  # parameters whose gradient has come in this step
        self._acts: dict[int, Callable[[], None]] = {}
        for each in parameters:
            each.parameter.register_post_accumulate_grad_hook(partial(self._take, each))
        self._storage.resize_(0)

    def attach_grad(self, replicated: ReplicatedParameter) -> None:
        """Does nothing: there is a gradient only while the function given to `when_complete` is called."""

    def when_complete(self, replicated: ReplicatedParameter, act: Callable[[], None]) -> None:
        """Lets each step call `act` when `replicated.local.grad` is the sum over the data ranks. The gradient is gone
        afterwards."""
        self._acts[id(replicated)] = act

    def start_reduction(self) -> None:
        if not self._storage.nbytes():  # none of its parameters was used
            self._allocate()
        super().start_reduction()
        if self._finish is None:  # one data rank has nobody to wait for
            self.finish_reduction()

    def finish_reduction(self) -> None:
        super().finish_reduction()
        if not self._storage.nbytes():
            return
        for each in self.parameters:
            super().attach_grad(each)
            self._acts[id(each)]()
            each.local.grad = None
        self._storage.resize_(0)

    def clear(self) -> None:
        self._taken.clear()

    def _allocate(self) -> None:
        self._storage.resize_(self._nbytes)
        self.memory.zero_()

    @torch.no_grad()
    def _take(self, replicated: ReplicatedParameter, parameter: Tensor) -> None:
        """Moves the gradient that autograd has made to the bucket."""
        if id(replicated) in self._taken:
            raise RuntimeError(
                "a second backward in one step, whose first has already stepped this parameter: call clear_gradients() "
                "of what shard() gave in each step, and add up microbatches without step_in_backward"
            )
        if not self._taken:
            self._allocate()
        assert parameter.grad is not None
        replicated.gradient.copy_(local_tensor(parameter.grad))
        parameter.grad = None
        self._taken.add(id(replicated))
        if len(self._taken) == len(self.parameters):
            self._filled()

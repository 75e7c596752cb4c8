"""One piece of memory for the gradients of many parameters, and what is sent of it.

Gradients are views into it (`.grad`, and `main_grad` for those that a backward adds itself), so that a microbatch adds
where the collective will read, one call clears a bucket, and no copy stands between a backward and its all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.layers.parameter import like_parameter, local_tensor
from parallel3d.mesh import Axis
from parallel3d.sharding.exchange import start_all_gather, start_reduce_scatter, wait
from parallel3d.sharding.packing import Packing


@dataclass(frozen=True)
class DataAxes:
    """The axes of the data dimension. `every`: over both, in one group."""

    replicate: Axis
    shard: Axis
    every: Axis


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter that is whole on this rank, its gradient, and what the optimizer steps of it: `local`."""

    parameter: nn.Parameter
    local: nn.Parameter  # own rows of the parameter itself, or of its master copy
    gradient: Tensor  # of the parameter, a view into a bucket
    own_gradient: Tensor  # of `local`, a view into `gradient`
    shown: Tensor | None  # `gradient` as the parameter's `.grad`; None where it has other bits, and autograd needs help

    @classmethod
    def of(
        cls, parameter: nn.Parameter, local: nn.Parameter, gradient: Tensor, own_gradient: Tensor
    ) -> ReplicatedParameter:
        """Lets a backward of `parameter` add to `gradient`."""
        shown = like_parameter(parameter, gradient) if parameter.dtype == gradient.dtype else None
        whole = cls(parameter, local, gradient, own_gradient, shown)
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        if shown is None:
            parameter.register_post_accumulate_grad_hook(lambda _: whole._take_gradient())
        else:
            parameter.grad = shown
        return whole

    @property
    def has_master(self) -> bool:
        return self.local.dtype != self.parameter.dtype

    @property
    def is_in_place(self) -> bool:
        return self.parameter.grad is self.shown

    def _take_gradient(self) -> None:
        """Moves what autograd has given to the bucket."""
        grad = self.parameter.grad
        if grad is not None:
            self.gradient.add_(local_tensor(grad))
            self.parameter.grad = None


class Bucket:
    """Gradients of `wholes`, which all lie in `memory`, one after the other.

    `split`: only this rank's rows of the sum are made (reduce-scatter over dp_shard, then an all-reduce of the rows
    over dp_replicate), else all of it, on all ranks (one all-reduce). `reduce_dtype`: what is sent. `average`: the sum
    is divided by the number of data ranks.
    """

    def __init__(
        self,
        wholes: Sequence[ReplicatedParameter],
        memory: Tensor,
        axes: DataAxes,
        *,
        split: bool,
        reduce_dtype: torch.dtype,
        average: bool,
    ) -> None:
        self.wholes = wholes
        self.memory = memory
        self._axes = axes
        self._split = split and axes.shard.size > 1
        self._reduce_dtype = reduce_dtype
        self._scale = 1.0 / axes.every.size if average else 1.0
        self._finish: Callable[[], None] | None = None
        if self._split:
            self._packing = Packing([whole.gradient.shape for whole in wholes], axes.shard.size)

    def attach_grad(self, whole: ReplicatedParameter) -> None:
        """Puts the gradient where the optimizer reads it."""
        whole.local.grad = whole.own_gradient

    def when_complete(self, whole: ReplicatedParameter, act: Callable[[], None]) -> None:
        """See `OptimizerPart.when_complete`. Raises RuntimeError where gradients are kept until they are cleared."""
        raise RuntimeError("gradients are kept until clear_gradients(): call shard() with step_in_backward=True")

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
        sent = self._packing.pack([whole.gradient for whole in self.wholes], self._reduce_dtype)
        received = start_reduce_scatter(sent, self._axes.shard)

        def finish() -> None:
            nonlocal sent
            own = received()
            del sent
            if self._axes.replicate.size > 1:
                dist.all_reduce(own, group=self._axes.replicate.group)
            self._divide(own)
            self._packing.unpack_own(own, [whole.own_gradient for whole in self.wholes])

        self._finish = finish

    def _divide(self, total: Tensor) -> None:
        if self._scale != 1.0:
            total.mul_(self._scale)

    @torch.no_grad()
    def start_publish(self) -> Callable[[], None]:
        """Starts to make the parameters what the optimizer has made of their parts; returns how to finish it."""
        if not self._split:
            for whole in self.wholes:
                if whole.has_master:
                    local_tensor(whole.parameter).copy_(whole.local)
            return lambda: None
        sent = self._packing.pack_own([whole.local for whole in self.wholes], self.wholes[0].parameter.dtype)
        received = start_all_gather(sent, self._axes.shard)

        def finish() -> None:
            with torch.no_grad():
                self._packing.unpack(received(), [local_tensor(whole.parameter) for whole in self.wholes])

        return finish

"""Buckets whose memory exists only while a backward goes through their units, for an optimizer that steps in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from parallel3d.layers.parameter import local_tensor
from parallel3d.sharding.bucket import Bucket, DataAxes, ReplicatedParameter


class StepInBackwardBucket(Bucket):
    """Gets its memory with the first gradient of a step, and gives it back when each of `wholes` has been handed to who
    asked for it by `when_complete`. There is one backward a step, whose gradients go through autograd.

    `filled` is called when the last gradient has come.
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
        filled: Callable[[], None],
    ) -> None:
        super().__init__(wholes, memory, axes, split=split, reduce_dtype=reduce_dtype, average=average)
        self._storage, self._nbytes = memory.untyped_storage(), memory.nbytes
        self._filled = filled
        self._taken: set[int] = set()  # parameters whose gradient has come in this step
        self._takers: dict[int, Callable[[], None]] = {}
        for whole in wholes:
            whole.parameter.register_post_accumulate_grad_hook(partial(self._take, whole))
        self._free()

    def attach_grad(self, whole: ReplicatedParameter) -> None:
        """There is a gradient only while `when_complete` hands it over."""

    def when_complete(self, whole: ReplicatedParameter, act: Callable[[], None]) -> None:
        """Lets each step call `act` when `whole.local.grad` is the sum over the data ranks; it is gone afterwards."""
        self._takers[id(whole)] = act

    def start_reduction(self) -> None:
        if not self._has_memory:  # none of its parameters was used
            self._allocate()
        super().start_reduction()
        if self._finish is None:  # there is nobody to wait for
            self.finish_reduction()

    def finish_reduction(self) -> None:
        super().finish_reduction()
        if not self._has_memory:
            return
        for whole in self.wholes:
            super().attach_grad(whole)
            self._takers[id(whole)]()
            whole.local.grad = None
        self._free()

    def clear(self) -> None:
        self._taken.clear()

    @property
    def _has_memory(self) -> bool:
        return self._storage.nbytes() > 0

    def _allocate(self) -> None:
        self._storage.resize_(self._nbytes)
        self.memory.zero_()

    def _free(self) -> None:
        self._storage.resize_(0)

    @torch.no_grad()
    def _take(self, whole: ReplicatedParameter, parameter: Tensor) -> None:
        """Moves what autograd has given to the bucket."""
        if id(whole) in self._taken:
            raise RuntimeError(
                "a second backward in one step, whose first has already stepped this parameter: call clear_gradients() "
                "of what shard() gave in each step, and add up microbatches without step_in_backward"
            )
        if not self._taken:
            self._allocate()
        assert parameter.grad is not None
        whole.gradient.copy_(local_tensor(parameter.grad))
        parameter.grad = None
        self._taken.add(id(whole))
        if len(self._taken) == len(self.wholes):
            self._filled()

"""What a step makes of its gradients: one step of the optimizer when all are complete, or one of each parameter in the
backward, which keeps no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from parallel3d.mesh import Axis
from parallel3d.optimizers.build import LocalOptimizer
from parallel3d.optimizers.stochastic_rounding import step_in_float32
from parallel3d.sharding.parts import LocalParameter
from parallel3d.torch_private import scale_
from parallel3d.training.gradients import GradientSync, squared_norm
from parallel3d.training.learning_rate import set_learning_rate

Observe = Callable[[LocalParameter], None]
Step = Callable[[torch.optim.Optimizer, Sequence[LocalParameter], int], None]


class Update(Protocol):
    """Called in this order in each step, `apply` only where loss and norm are finite."""

    @property
    def is_in_backward(self) -> bool:
        """Whether parameters have changed before `apply`. The gradients must then need no factor."""
        ...

    def begin(self, step: int, rate: float, observe: Observe | None) -> None:
        """Before the backward of `step`, counted from 0. `observe` gets each parameter with its complete gradient,
        before anything is done with it."""
        ...

    def complete(self) -> Tensor:
        """After the backward, when gradients are summed over the data ranks: this rank's share of the squared norm."""
        ...

    def apply(self, factor: float) -> None:
        """Steps with the gradients times `factor`."""
        ...


class UpdateAfterBackward:
    """The usual way."""

    is_in_backward = False

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        optimizer: LocalOptimizer,
        gradients: GradientSync,
        axes: Mapping[str, Axis],
        step: Step,
    ) -> None:
        self.gradients = gradients
        self._parameters, self._optimizer, self._axes, self._step = parameters, optimizer, axes, step
        self._number = 0
        self._observe: Observe | None = None

    def begin(self, step: int, rate: float, observe: Observe | None) -> None:
        self._number, self._observe = step, observe
        set_learning_rate(self._optimizer, rate)

    def complete(self) -> Tensor:
        for parameter in self._parameters:
            parameter.sync_views()
        self.gradients.complete()
        if self._observe is not None:
            for parameter in self._parameters:
                self._observe(parameter)
        return squared_norm(self._parameters, self._axes)

    def apply(self, factor: float) -> None:
        if factor != 1.0:  # the one time that gradients are multiplied
            scale_([p.local.grad for p in self._parameters if p.local.grad is not None], factor)
        self._step(self._optimizer, self._parameters, self._number)


class UpdateInBackward:
    """Each parameter is stepped when its gradient is complete, and the gradient dropped, so that only a few exist at a
    time. There is one backward a step, whose gradients go through autograd, which also sums those over tp."""

    is_in_backward = True

    def __init__(
        self, parameters: Sequence[LocalParameter], optimizer: LocalOptimizer, axes: Mapping[str, Axis], step: Step
    ) -> None:
        self._parameters, self._optimizer, self._axes, self._step = parameters, optimizer, axes, step
        self._number = 0
        self._observe: Observe | None = None
        self._squares: list[Tensor] = []
        for parameter in parameters:
            parameter.part.when_complete(partial(self._update, parameter))

    def begin(self, step: int, rate: float, observe: Observe | None) -> None:
        self._number, self._observe = step, observe
        self._squares = []
        set_learning_rate(self._optimizer, rate)

    def complete(self) -> Tensor:
        assert len(self._squares) == len(self._parameters), "a parameter has had no gradient, or two"
        return torch.stack(self._squares).sum()

    def apply(self, factor: float) -> None:
        assert factor == 1.0, f"gradients were stepped with, and should have been {factor} times as large"

    def _update(self, parameter: LocalParameter) -> None:
        if self._observe is not None:
            self._observe(parameter)
        self._squares.append(squared_norm([parameter], self._axes))
        self._step(self._optimizer.part_of(parameter), [parameter], self._number)


def step_with(seed: int | None) -> Step:
    """How parameters are stepped: as the optimizer does it, or rounded stochastically with noise of `seed`."""

    def step(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter], number: int) -> None:
        if seed is None:
            optimizer.step()
        else:
            step_in_float32(optimizer, parameters, seed=seed, step=number)

    return step

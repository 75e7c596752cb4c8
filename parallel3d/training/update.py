"""How a step changes the parameters: the learning rate, then one step of the optimizer when all gradients are complete,
or one of each parameter in the backward, which keeps no gradient.

Everything here works on plain tensors, this rank's part of each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig, Recipe
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis, axes_of
from parallel3d.optimizers.build import LocalOptimizer
from parallel3d.optimizers.rounding import step_in_float32
from parallel3d.parallelize import Parallelized
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import norms, scale_

Observe = Callable[[LocalParameter], None]
Step = Callable[[torch.optim.Optimizer, Sequence[LocalParameter], int], None]


class Update(Protocol):
    """What a training step makes of its gradients. The trainer calls these methods in this order in each step, and
    `apply` only where loss and norm are finite."""

    def begin(self, step: int, rate: float, observe: Observe | None) -> None:
        """Prepares the backward of `step`, which counts from 0. `observe` is called with each parameter when its
        gradient is complete, before anything is done with it."""
        ...

    def complete(self) -> Tensor:
        """Called when gradients are summed over the data ranks. Returns this rank's share of the squared norm."""
        ...

    def apply(self, factor: float) -> None:
        """Steps with the gradients times `factor`."""
        ...


class UpdateAfterBackward:
    """Steps all parameters when the backward is done and the gradients are scaled and clipped."""

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
        _set_learning_rate(self._optimizer, rate)

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
    """Steps each parameter when its gradient is complete, and drops the gradient, so that only a few exist at a time.
    There is one backward a step, whose gradients go through autograd, which also sums them over tp. The gradients must
    need no factor: the loss is divided by the counted labels, and nothing is clipped."""

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
        _set_learning_rate(self._optimizer, rate)

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


def build_update(
    parts: Parallelized, optimizer: LocalOptimizer, recipe: Recipe, mesh: DeviceMesh, ends: tuple[int, int]
) -> Update:
    """Builds the update that the recipe asks for. `ends` are the pipeline ranks that hold the first and the last stage.
    With optimizer.stochastic_rounding a step's results are rounded with noise of train.seed."""
    seed = recipe.train.seed if recipe.optimizer.stochastic_rounding else None

    def step(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter], number: int) -> None:
        if seed is None:
            optimizer.step()
        else:
            step_in_float32(optimizer, parameters, seed=seed, step=number)

    axes = axes_of(mesh)
    if recipe.optimizer.step_in_backward:
        return UpdateInBackward(parts.parameters, optimizer, axes, step)
    gradients = GradientSync(parts.parameters, mesh, parts.tied, ends)
    return UpdateAfterBackward(parts.parameters, optimizer, gradients, axes, step)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Returns the rate of step 1, 2, ...: linear to the peak at `warmup_steps`, then a cosine down to `min_lr_ratio` of
    the peak at `decay_steps` (default: `steps`, the length of the run), then flat."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    last = steps if config.decay_steps is None else config.decay_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group. A group with `lr_ratio` gets the rate times its ratio: Muon's matrices, where they
    have a rate of their own."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


class GradientSync:
    """Completes the gradients that the backward left partial: over tp, and between the two ends of the pipeline."""

    def __init__(
        self, parameters: Sequence[LocalParameter], mesh: DeviceMesh, tied: frozenset[str], ends: tuple[int, int]
    ) -> None:
        """`tied` has the names of the parameters that the model uses twice, `ends` the pipeline ranks that hold the
        first and the last stage."""
        self._tp = Axis.of(mesh["tp"])
        self._partial = [p for p in parameters if p.spec.partial_gradient and self._tp.size > 1]
        self._ends = _pipeline_ends(mesh["pp"], ends) if tied else None
        self._tied = [p for p in parameters if p.name in tied] if self._ends else []
        # A rank that is both ends, as on a V, has the tied weight twice; a single stage has it once.
        is_one_rank = ends[0] == ends[1]
        named = [[p for p in parameters if p.name == name] for name in tied] if is_one_rank else []
        self._pairs = [pair for pair in named if len(pair) == 2]

    def complete(self) -> None:
        """Sums the gradients: one all-reduce over tp of the norms' weights (with sequence parallelism), and one of each
        tied weight between the first and the last pipeline rank."""
        if self._partial:
            gradients = [_gradient(p) for p in self._partial]
            summed = all_reduce(torch.cat([g.flatten() for g in gradients]), self._tp)
            for gradient, total in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        for parameter in self._tied:
            dist.all_reduce(_gradient(parameter), group=self._ends)
        for first, second in self._pairs:
            _gradient(second).copy_(_gradient(first).add_(_gradient(second)))


def squared_norm(parameters: Sequence[LocalParameter], axes: Mapping[str, Axis]) -> Tensor:
    """Returns this rank's share of the squared norm of the whole gradient, a float64 scalar. The sum of the shares over
    all ranks of the mesh is the squared norm, each parameter counted once."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.is_copy:
            by_copies.setdefault(parameter.copies(axes), []).append(_gradient(parameter))
    shares = [_sum_of_squares(gradients) / copies for copies, gradients in by_copies.items()]
    return sum(shares, torch.zeros((), dtype=torch.float64))


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    # The norms are float32 at least, because torch's own total norm of bf16 gradients would be rounded to bf16.
    each = norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(each)).double().square()


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.local.grad
    assert gradient is not None, f"{parameter.name} has no gradient"
    return gradient


def _pipeline_ends(pp: DeviceMesh, ends: tuple[int, int]) -> dist.ProcessGroup | None:
    """Returns the group of this pipeline's two end ranks on these ranks, and None elsewhere or if they are one rank."""
    if ends[0] == ends[1] or pp.get_local_rank() not in ends:
        return None
    ranks = dist.get_process_group_ranks(pp.get_group())
    group = dist.new_group([ranks[end] for end in ends], use_local_synchronization=True, group_desc="pipeline_ends")
    assert isinstance(group, dist.ProcessGroup)
    return group

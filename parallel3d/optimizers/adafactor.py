"""Adafactor over sharded parameters (Shazeer and Stern 2018, arXiv 1804.04235), with the arithmetic of torch's own.

Only the means of each row and each column of a matrix's squared gradients are kept. A rank has some rows, or columns,
of a matrix: means over a dim that is split are summed over the axes that split it, and so are the norms that scale the
update, so that they are those of the whole matrix. A step sends three all-reduces of vectors over each axis that splits
anything: row and column means with the norms of the parameters, the means of the row factors, the updates' norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallel3d.layers.collectives import all_reduce
from parallel3d.layers.gradients import as_dtensor
from parallel3d.mesh import Axis
from parallel3d.optimizers.rounding import apply
from parallel3d.optimizers.step_bytes import rounds
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import (
    foreach_clamp_min_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_rsqrt_,
    foreach_sqrt_,
    norms,
)

SMALLEST_RMS = 1e-3  # epsilon_2: the least RMS of a parameter that its steps are in proportion to
_EPSILON = torch.finfo(torch.float32).eps  # epsilon_1


@dataclass(frozen=True, eq=False)
class SteppedParameter:
    """A parameter in step number `step` (from 1), with its gradient in float32 and its optimizer's group and states."""

    local: Tensor
    gradient: Tensor
    shape: tuple[int, ...]  # the whole parameter's
    split: ParameterSharding
    state: dict[str, Tensor]
    group: dict[str, Any]
    step: float

    @property
    def weight(self) -> float:
        """The weight of this step's squared gradient, 1 - beta_2."""
        return float(self.step ** self.group["beta2_decay"])


class Adafactor(torch.optim.Optimizer):
    """Steps `groups`, which are torch's with "parameters" (LocalParameter) beside "params". The states are float32:
    "step", and "variance" of a vector or "row_var" [..., rows, 1] and "col_var" [..., 1, columns] of a matrix."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, beta2_decay: float, update_clip: float) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "update_clip": update_clip, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self._splits = {p.local: ParameterSharding(p) for group in groups for p in group["parameters"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["parameters"]]
        pairs = [(parameter, group) for parameter, group in pairs if parameter.local.grad is not None]
        for some in rounds(pairs, lambda pair: self._splits[pair[0].local].part_elements):
            self._step_together([self._counted(*pair) for pair in some])

    def _counted(self, parameter: LocalParameter, group: dict[str, Any]) -> SteppedParameter:
        """Counts a parameter's step. Its number is a tensor on the CPU, so that no GPU is waited for."""
        local, state = parameter.local, self.state[parameter.local]
        assert local.grad is not None
        state["step"] += 1
        step, shape = float(state["step"]), parameter.spec.shape
        return SteppedParameter(local, local.grad.float(), shape, self._splits[local], state, group, step)

    def _step_together(self, some: Sequence[SteppedParameter]) -> None:
        """Steps some parameters. An operator takes the tensors of all of them, where it can, and three times the sums
        over the axes are taken of all at once."""
        matrices, vectors = [one for one in some if one.local.ndim > 1], [one for one in some if one.local.ndim <= 1]
        some, sums = [*matrices, *vectors], Sums()
        rms = norms([one.local for one in some], torch.float32)
        rows = [_norm(m.gradient, dim=-1) for m in matrices]  # [..., rows, 1]
        columns = [_norm(m.gradient, dim=-2) for m in matrices]  # [..., 1, columns]
        foreach_mul_([*rms, *rows, *columns], [*rms, *rows, *columns])
        for one, square in zip(some, rms, strict=True):
            sums.add(square, one.split.axes)
        for m, of_rows, of_columns in zip(matrices, rows, columns, strict=True):
            sums.add(of_rows, m.split.along(m.local.ndim - 1))
            sums.add(of_columns, m.split.along(m.local.ndim - 2))
        sums.finish()

        row_vars, column_vars = [m.state["row_var"] for m in matrices], [m.state["col_var"] for m in matrices]
        if matrices:
            foreach_div_(rows, [m.shape[-1] for m in matrices])
            foreach_div_(columns, [m.shape[-2] for m in matrices])
            foreach_lerp_(row_vars, rows, [m.weight for m in matrices])
            foreach_lerp_(column_vars, columns, [m.weight for m in matrices])
        row_means = [row_var.sum(dim=-2, keepdim=True) for row_var in row_vars]  # [..., 1, 1]
        for m, row_mean in zip(matrices, row_means, strict=True):
            sums.add(row_mean, m.split.along(m.local.ndim - 2))
        sums.finish()

        updates = [row_var @ column_var for row_var, column_var in zip(row_vars, column_vars, strict=True)]
        if matrices:
            foreach_div_(row_means, [m.shape[-2] for m in matrices])
            foreach_clamp_min_(row_means, _EPSILON)
            foreach_div_(updates, row_means)
        if vectors:
            variances, squares = [v.state["variance"] for v in vectors], [v.gradient.square() for v in vectors]
            foreach_lerp_(variances, squares, [v.weight for v in vectors])
            foreach_copy_(squares, variances)
            updates += squares
        foreach_clamp_min_(updates, _EPSILON**2)
        foreach_rsqrt_(updates)
        foreach_mul_(updates, [one.gradient for one in some])
        changes = norms(updates, torch.float32)
        foreach_mul_(changes, changes)
        for one, change in zip(some, changes, strict=True):
            sums.add(change, one.split.axes)
        sums.finish()

        for squares in (rms, changes):
            foreach_div_(squares, [one.split.elements for one in some])
            foreach_sqrt_(squares)
        foreach_clamp_min_(rms, SMALLEST_RMS)
        foreach_mul_(rms, [min(one.group["lr"], one.step**-0.5) for one in some])
        foreach_div_(changes, [one.group["update_clip"] for one in some])
        foreach_clamp_min_(changes, 1.0)
        foreach_div_(rms, changes)
        foreach_mul_(updates, rms)
        for one, update in zip(some, updates, strict=True):
            apply(one.local, update, decay=one.group["lr"] * one.group["weight_decay"])


def start_states(local: Tensor) -> dict[str, Tensor]:
    """Returns the states that torch's Adafactor has of a parameter before its first step."""
    zeros = partial(local.new_zeros, dtype=torch.float32)
    if local.ndim < 2:
        return {"variance": zeros(local.shape)}
    return {"row_var": zeros((*local.shape[:-1], 1)), "col_var": zeros((*local.shape[:-2], 1, local.shape[-1]))}


def _norm(x: Tensor, dim: int) -> Tensor:
    """Returns the 2-norm over `dim`, which is kept with size 1."""
    return torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)


class ParameterSharding:
    """The axes that split each dim of a parameter. An axis splits one dim at most; a dim may be split by several."""

    def __init__(self, parameter: LocalParameter) -> None:
        self.elements = math.prod(parameter.spec.shape)  # the whole parameter's
        self.axes: dict[str, Axis] = {}  # all that split it, by name
        self._dims: dict[str, int] = {}  # the dim that each of them splits
        tensor = parameter.distributed(parameter.local.detach())
        if isinstance(tensor, DTensor):
            for name, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
                axis, dim = Axis.of(tensor.device_mesh[name]), getattr(placement, "dim", None)  # a shard has one
                if axis.size > 1 and dim is not None:
                    self.axes[name], self._dims[name] = axis, dim

    @property
    def part_elements(self) -> float:
        """The elements of a rank's part on average, which is the same number on all ranks."""
        return self.elements / math.prod(axis.size for axis in self.axes.values())

    def along(self, dim: int) -> dict[str, Axis]:
        """Returns the axes that split `dim`, which is not negative."""
        return {name: axis for name, axis in self.axes.items() if self._dims[name] == dim}


def without_dim(parameter: LocalParameter, dim: int, local: Tensor) -> Tensor:
    """Returns a statistic of a parameter over `dim` (not negative) as the tensor that all ranks hold together. `local`
    [..., 1, ...] is this rank's part of it. The tensor is split as the parameter is, and whole along that dim."""
    tensor = parameter.distributed(parameter.local.detach())
    if not isinstance(tensor, DTensor):
        return local
    shape = [1 if index == dim else size for index, size in enumerate(tensor.shape)]
    placements = [Replicate() if getattr(kept, "dim", None) == dim else kept for kept in tensor.placements]
    return as_dtensor(local, tensor.device_mesh, placements, torch.empty(shape, device="meta"))


class Sums:
    """Sums over axes, many at once: `add` asks for one, and `finish` sends one all-reduce for each axis."""

    def __init__(self) -> None:
        self._axes: dict[str, Axis] = {}
        self._wanted: dict[str, list[Tensor]] = {}

    def add(self, x: Tensor, axes: dict[str, Axis]) -> Tensor:
        """Returns `x`, which `finish` overwrites by its sum over `axes`. It is contiguous, and of one shape on all of
        their ranks."""
        for name, axis in axes.items():
            self._axes[name] = axis
            self._wanted.setdefault(name, []).append(x)
        return x

    def finish(self) -> None:
        for name in sorted(self._axes):  # in the same order on all ranks
            parts = self._wanted[name]
            total = all_reduce(torch.cat([part.flatten() for part in parts]), self._axes[name])
            split = total.split([part.numel() for part in parts])
            foreach_copy_(parts, [summed.view_as(part) for part, summed in zip(parts, split, strict=True)])
        self._axes.clear()
        self._wanted.clear()

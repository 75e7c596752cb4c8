"""Adafactor over sharded parameters (Shazeer and Stern 2018, arXiv 1804.04235), with the arithmetic of torch's own.

Only the means of each row and each column of a matrix's squared gradients are kept. A rank has some rows, or columns,
of a matrix: means over a dim that is split are summed over the axes that split it, and so are the norms that scale the
update, so that they are those of the whole matrix. A step sends three all-reduces of vectors over each axis that splits
anything: row and column means with the norms of the parameters, the means of the row factors, the updates' norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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

SMALLEST_RMS = 1e-3  # epsilon_2: the least RMS of a parameter that its steps are in proportion to
_EPSILON = torch.finfo(torch.float32).eps  # epsilon_1


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
            sums = Sums()
            for _ in zip(*[self._stepping(*pair, sums) for pair in some], strict=True):
                sums.finish()

    def _stepping(self, parameter: LocalParameter, group: dict[str, Any], sums: Sums) -> Iterator[None]:
        """Steps a parameter. Wherever it yields, the sums over the axes that it has asked for are taken, together with
        those of other parameters that are stepped beside it."""
        local, shape = parameter.local, parameter.spec.shape
        split, state = self._splits[local], self.state[local]
        assert local.grad is not None
        gradient, last = local.grad.float(), local.ndim - 1
        is_matrix = local.ndim > 1
        state["step"] += 1
        step = state["step"].item()
        weight = step ** group["beta2_decay"]  # the weight of this step's squared gradient, 1 - beta_2
        norm = sums.add(_square(local), split.axes)
        if is_matrix:
            of_rows = sums.add(_square(gradient, last), split.along(last))  # [..., rows, 1]
            of_columns = sums.add(_square(gradient, last - 1), split.along(last - 1))  # [..., 1, columns]
        yield

        if is_matrix:
            state["row_var"].lerp_(of_rows.div_(shape[-1]), weight)
            state["col_var"].lerp_(of_columns.div_(shape[-2]), weight)
            row_sum = sums.add(state["row_var"].sum(dim=-2, keepdim=True), split.along(last - 1))  # [..., 1, 1]
        yield

        if is_matrix:
            row_mean = row_sum.div_(shape[-2]).clamp_(min=_EPSILON)
            moment = (state["row_var"] @ state["col_var"]).div_(row_mean)
        else:
            moment = state["variance"].lerp_(gradient.square(), weight).clone()
        update = moment.clamp_(min=_EPSILON**2).rsqrt_().mul_(gradient)
        change = sums.add(_square(update), split.axes)
        yield

        rate = min(group["lr"], step**-0.5) * (norm / split.elements).sqrt().clamp(min=SMALLEST_RMS)
        too_large = (change / split.elements).sqrt().div(group["update_clip"]).clamp(min=1.0)
        apply(local, update.mul_(rate / too_large), decay=group["lr"] * group["weight_decay"])


def start_states(local: Tensor) -> dict[str, Tensor]:
    """Returns the states that torch's Adafactor has of a parameter before its first step."""
    zeros = partial(local.new_zeros, dtype=torch.float32)
    if local.ndim < 2:
        return {"variance": zeros(local.shape)}
    return {"row_var": zeros((*local.shape[:-1], 1)), "col_var": zeros((*local.shape[:-2], 1, local.shape[-1]))}


def _square(x: Tensor, dim: int | None = None) -> Tensor:
    """Returns the sum of squares; with `dim` over that dim alone, which is kept with size 1."""
    return torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None, dtype=torch.float32).square_()


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
            for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))
        self._axes.clear()
        self._wanted.clear()

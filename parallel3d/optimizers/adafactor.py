"""Adafactor over sharded parameters (Shazeer and Stern 2018, arXiv 1804.04235), with the arithmetic of torch's own.

Only the means of each row and each column of a matrix's squared gradients are kept. A rank has some rows, or columns,
of a matrix: means over a dim that is split are summed over the axes that split it, and so are the norms that scale the
update, so that they are those of the whole matrix. A step sends three all-reduces of vectors over each axis that splits
anything: row and column means with the norms of the parameters, the means of the row factors, the updates' norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.optimizers.assignment import rounds
from parallel3d.optimizers.low_precision_state import apply
from parallel3d.optimizers.parameter_sharding import ParameterSharding, Sums
from parallel3d.sharding.optimizer_parts import LocalParameter

SMALLEST_RMS = 1e-3  # epsilon_2: the least RMS of a parameter that its steps are in proportion to
_EPSILON = torch.finfo(torch.float32).eps  # epsilon_1


@dataclass(frozen=True)
class _Stepping:
    """A parameter while it is stepped."""

    parameter: LocalParameter
    group: dict[str, Any]
    state: dict[str, Tensor]
    gradient: Tensor  # float32
    split: ParameterSharding

    @property
    def decay(self) -> float:
        """The weight of this step's squared gradient, 1 - beta_2."""
        weight: float = self.state["step"].item() ** self.group["beta2_decay"]
        return weight


class Adafactor(torch.optim.Optimizer):
    """Steps `groups`, which are torch's with "parameters" (LocalParameter) beside "params". The states are float32:
    "step", and "variance" of a vector or "row_var" [..., rows, 1] and "col_var" [..., 1, columns] of a matrix."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, beta2_decay: float, update_clip: float) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "update_clip": update_clip, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self._splits = {p.local: ParameterSharding.of(p) for group in groups for p in group["parameters"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["parameters"]]
        pairs = [(parameter, group) for parameter, group in pairs if parameter.local.grad is not None]
        for some in rounds(pairs, lambda pair: self._splits[pair[0].local].part_elements):
            _step([self._begin(parameter, group) for parameter, group in some])

    def _begin(self, parameter: LocalParameter, group: dict[str, Any]) -> _Stepping:
        local = parameter.local
        assert local.grad is not None
        state = self.state[local]
        state["step"] += 1
        return _Stepping(parameter, group, state, local.grad.float(), self._splits[local])


def _step(stepping: Sequence[_Stepping]) -> None:
    """Steps some parameters, whose sums over the axes are taken together."""
    sums = Sums()
    norms = [sums.add(_square(each.parameter.local), each.split.axes) for each in stepping]
    squares = [_squares(each, sums) for each in stepping]
    sums.finish()
    means = [_update_statistics(each, *pair, sums) for each, pair in zip(stepping, squares, strict=True)]
    sums.finish()
    updates = [_update(each, mean) for each, mean in zip(stepping, means, strict=True)]
    changes = [sums.add(_square(update), each.split.axes) for each, update in zip(stepping, updates, strict=True)]
    sums.finish()
    for each, update, norm, change in zip(stepping, updates, norms, changes, strict=True):
        lr, weight_decay = each.group["lr"], each.group["weight_decay"]
        rate = min(lr, each.state["step"].item() ** -0.5)
        rms = (norm / each.split.elements).sqrt().clamp(min=SMALLEST_RMS)
        too_large = (change / each.split.elements).sqrt().div(each.group["update_clip"]).clamp(min=1.0)
        apply(each.parameter.local, update.mul_(rate * rms / too_large), decay=lr * weight_decay)


def _squares(each: _Stepping, sums: Sums) -> tuple[Tensor | None, Tensor | None]:
    """Asks for the sums of squares of a matrix's gradient over its columns [..., rows, 1] and over its rows
    [..., 1, columns]. A vector has none."""
    if each.gradient.ndim < 2:
        return None, None
    rows, columns = each.gradient.ndim - 2, each.gradient.ndim - 1
    of_rows = sums.add(_square(each.gradient, columns), each.split.along(columns))
    return of_rows, sums.add(_square(each.gradient, rows), each.split.along(rows))


def _update_statistics(each: _Stepping, row_sum: Tensor | None, col_sum: Tensor | None, sums: Sums) -> Tensor:
    """Moves the running means on. For a matrix it asks for the sum of its row factors [..., 1, 1] and returns that."""
    state = each.state
    if row_sum is None or col_sum is None:
        state["variance"].lerp_(each.gradient.square(), each.decay)
        return state["variance"]
    *_, rows, columns = each.parameter.spec.shape
    state["row_var"].lerp_(row_sum.div_(columns), each.decay)
    state["col_var"].lerp_(col_sum.div_(rows), each.decay)
    return sums.add(state["row_var"].sum(dim=-2, keepdim=True), each.split.along(each.gradient.ndim - 2))


def _update(each: _Stepping, row_sum: Tensor) -> Tensor:
    """Returns the gradient divided by the root of its estimated second moment."""
    if each.gradient.ndim > 1:
        mean = row_sum.div_(each.parameter.spec.shape[-2]).clamp_(min=_EPSILON)
        moment = (each.state["row_var"] @ each.state["col_var"]).div_(mean)
    else:
        moment = each.state["variance"].clone()
    return moment.clamp_(min=_EPSILON**2).rsqrt_().mul_(each.gradient)


def start_states(parameter: LocalParameter) -> dict[str, Tensor]:
    """Returns the states that torch's Adafactor has of a parameter before its first step."""
    local = parameter.local
    zeros = torch.zeros_like(local, dtype=torch.float32)
    if local.ndim < 2:
        return {"variance": zeros}
    rows = zeros.new_zeros((*local.shape[:-1], 1))
    return {"row_var": rows, "col_var": zeros.new_zeros((*local.shape[:-2], 1, local.shape[-1]))}


def _square(x: Tensor, dim: int | None = None) -> Tensor:
    """Returns the sum of squares; with `dim` over that dim alone, which is kept with size 1."""
    return torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None, dtype=torch.float32).square_()

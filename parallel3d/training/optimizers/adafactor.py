"""Adafactor over sharded parameters (Shazeer and Stern 2018, arXiv 1804.04235), with the arithmetic of torch's own.

Of a matrix's squared gradients only the means of each row and each column are kept. A rank has some rows, or columns,
of a matrix: means over what is split are summed over the axes that split it, so that they are those of the whole
matrix, and so are the norms that scale the update. Each step sends, per axis that splits anything, three all-reduces of
vectors: the row and column means with the norms of the parameters, the means of the row factors, the updates' norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.training.gradients import LocalParameter
from parallel3d.training.optimizers.narrow import apply
from parallel3d.training.optimizers.split import Split, Sums

SMALLEST_RMS = 1e-3  # epsilon_2: of a parameter, which its steps are in proportion to
_EPSILON = torch.finfo(torch.float32).eps  # epsilon_1


@dataclass(frozen=True)
class _Stepping:
    """A parameter on its way through a step."""

    parameter: LocalParameter
    group: dict[str, Any]
    state: dict[str, Tensor]
    gradient: Tensor  # float32
    split: Split
    norm: Tensor  # [], of the parameter, squared
    row_sum: Tensor | None  # [..., rows, 1], of the squared gradient; None: a vector
    col_sum: Tensor | None  # [..., 1, columns]

    @property
    def elements(self) -> int:
        return math.prod(self.parameter.own.spec.shape)

    @property
    def decay(self) -> float:
        """1 - beta_2 of this step."""
        weight: float = self.state["step"].item() ** self.group["beta2_decay"]
        return weight


class Adafactor(torch.optim.Optimizer):
    """`groups` as torch's, with "parameters" (LocalParameter) beside "params". States, all float32: "step"; of a vector
    "variance"; else "row_var" [..., rows, 1] and "col_var" [..., 1, columns]."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, beta2_decay: float, update_clip: float) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "update_clip": update_clip, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self._splits = {p.local: Split.of(p) for group in groups for p in group["parameters"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        sums = Sums()
        stepping = [self._begin(p, group, sums) for group in self.param_groups for p in _with_gradient(group)]
        sums.finish()
        means = [_update_statistics(each, sums) for each in stepping]
        sums.finish()
        updates = [_update(each, mean) for each, mean in zip(stepping, means, strict=True)]
        norms = [sums.add(_square(update), each.split.axes) for each, update in zip(stepping, updates, strict=True)]
        sums.finish()
        for each, update, norm in zip(stepping, updates, norms, strict=True):
            lr, weight_decay = each.group["lr"], each.group["weight_decay"]
            rate = min(lr, each.state["step"].item() ** -0.5)
            rms = (each.norm / each.elements).sqrt().clamp(min=SMALLEST_RMS)
            too_large = (norm / each.elements).sqrt().div(each.group["update_clip"]).clamp(min=1.0)
            apply(each.parameter.local, update.mul_(rate * rms / too_large), decay=lr * weight_decay)

    def _begin(self, parameter: LocalParameter, group: dict[str, Any], sums: Sums) -> _Stepping:
        """Asks for the sums of squares: of the parameter, and of its gradient's rows and columns."""
        local, split = parameter.local, self._splits[parameter.local]
        assert local.grad is not None
        state = self.state[local]
        state["step"] += 1
        gradient = local.grad.float()
        row_sum = col_sum = None
        if gradient.ndim > 1:
            rows, columns = gradient.ndim - 2, gradient.ndim - 1
            row_sum = sums.add(_square(gradient, columns), split.along(columns))
            col_sum = sums.add(_square(gradient, rows), split.along(rows))
        norm = sums.add(_square(local), split.axes)
        return _Stepping(parameter, group, state, gradient, split, norm, row_sum, col_sum)


def _update_statistics(each: _Stepping, sums: Sums) -> Tensor:
    """The running means; of a matrix, asks for the sum of its row factors [..., 1, 1], which it returns."""
    state = each.state
    if each.row_sum is None or each.col_sum is None:
        state["variance"].lerp_(each.gradient.square(), each.decay)
        return state["variance"]
    *_, rows, columns = each.parameter.own.spec.shape
    state["row_var"].lerp_(each.row_sum.div_(columns), each.decay)
    state["col_var"].lerp_(each.col_sum.div_(rows), each.decay)
    return sums.add(state["row_var"].sum(dim=-2, keepdim=True), each.split.along(each.gradient.ndim - 2))


def _update(each: _Stepping, row_sum: Tensor) -> Tensor:
    """The gradient over the root of its estimated second moment."""
    if each.row_sum is not None:
        mean = row_sum.div_(each.parameter.own.spec.shape[-2]).clamp_(min=_EPSILON)
        moment = (each.state["row_var"] @ each.state["col_var"]).div_(mean)
    else:
        moment = each.state["variance"].clone()
    return moment.clamp_(min=_EPSILON**2).rsqrt_().mul_(each.gradient)


def start_states(parameter: LocalParameter) -> dict[str, Tensor]:
    """Those that torch's Adafactor has of a parameter, before its first step."""
    local = parameter.local
    zeros = torch.zeros_like(local, dtype=torch.float32)
    if local.ndim < 2:
        return {"variance": zeros}
    rows = zeros.new_zeros((*local.shape[:-1], 1))
    return {"row_var": rows, "col_var": zeros.new_zeros((*local.shape[:-2], 1, local.shape[-1]))}


def _with_gradient(group: dict[str, Any]) -> Sequence[LocalParameter]:
    return [parameter for parameter in group["parameters"] if parameter.local.grad is not None]


def _square(x: Tensor, dim: int | None = None) -> Tensor:
    """The sum of squares, over `dim` alone where given, which is kept with size 1."""
    return torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None, dtype=torch.float32).square_()

"""Muon over sharded parameters: momentum whose matrix is made nearly orthogonal before it is stepped along.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025, "Muon is scalable for LLM training", arXiv
2502.16982, for the rate's adjustment, weight decay and dividing the work. The arithmetic is that of torch.optim.Muon:
the update of a sharded matrix is the one that the whole matrix has in one process, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.optimizers.assignment import rounds
from parallel3d.optimizers.low_precision_state import apply
from parallel3d.optimizers.matrices import MatrixExchange, StageGroup
from parallel3d.optimizers.parameter_sharding import ParameterSharding
from parallel3d.sharding.optimizer_parts import LocalParameter

LrAdjust = Literal["original", "match_rms_adamw"]

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan's: steep at zero, and near one from there on
_EPSILON = 1e-7


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """The numbers of a Muon. `lr_ratio` is what a learning rate schedule multiplies the run's rate by for matrices."""

    lr: float
    lr_ratio: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int  # steps of the Newton-Schulz iteration
    ns_dtype: torch.dtype  # the dtype of the iteration, and of what is sent for it
    lr_adjust: LrAdjust


class Muon(torch.optim.Optimizer):
    """Steps matrices. The momentum is split as its parameter is. Two all-to-alls over the ranks of the stage gather
    what is to be made orthogonal and scatter the result; each sends this rank's part in `ns_dtype`. `state` must have
    "momentum_buffer" of each parameter before the first step. Every rank of `mesh` builds it."""

    def __init__(self, matrices: Sequence[LocalParameter], mesh: DeviceMesh, settings: MuonSettings) -> None:
        defaults = {"lr": settings.lr, "lr_ratio": settings.lr_ratio}
        defaults |= {"weight_decay": settings.weight_decay, "momentum": settings.momentum}
        super().__init__([matrix.local for matrix in matrices], defaults)
        self._matrices, self._settings = matrices, settings
        self._part_elements = [ParameterSharding.of(matrix).part_elements for matrix in matrices]
        self._stage = StageGroup.of(mesh)
        self._parts = self._stage.parts_of(matrices)
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}  # one for each round, by its matrices

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        stepped = [index for index, matrix in enumerate(self._matrices) if matrix.local.grad is not None]
        for matrices in rounds(stepped, self._part_elements.__getitem__):
            self._step_together(matrices, group)

    def _step_together(self, matrices: Sequence[int], group: dict[str, Any]) -> None:
        """Steps some matrices. Each tensor is dropped as early as can be: together they are as large as the gradients
        of the matrices, and the iteration makes several of the size of each matrix that this rank owns."""
        exchange = self._exchange_of(tuple(matrices))
        wholes = exchange.gather([self._momentum(self._matrices[matrix], group["momentum"]) for matrix in matrices])
        for at in range(len(wholes)):
            wholes[at] = orthogonalize(wholes[at], self._settings.ns_steps)
        like = self._matrices[0].local.new_empty(0, dtype=self._settings.ns_dtype)
        updates = exchange.scatter(wholes, like)
        del wholes
        for matrix, update in zip(matrices, updates, strict=True):
            parameter = self._matrices[matrix]
            rate = group["lr"] * adjustment(self._settings.lr_adjust, parameter.spec.shape)
            apply(parameter.local, update.float().mul_(rate), decay=group["lr"] * group["weight_decay"])

    def _momentum(self, matrix: LocalParameter, momentum: float) -> Tensor:
        """Moves the momentum buffer on; returns what is to be made orthogonal, this rank's part of it."""
        local = matrix.local
        assert local.grad is not None
        gradient = local.grad.float()
        state = self.state[local]["momentum_buffer"]
        buffer = state.float().lerp_(gradient, 1 - momentum)
        state.copy_(buffer)
        direction = gradient.lerp(buffer, momentum) if self._settings.nesterov else buffer
        return direction.to(self._settings.ns_dtype)

    def _exchange_of(self, matrices: tuple[int, ...]) -> MatrixExchange:
        if matrices not in self._exchanges:
            parts = [self._parts[matrix] for matrix in matrices]
            shapes = [self._matrices[matrix].spec.shape for matrix in matrices]
            self._exchanges[matrices] = MatrixExchange.of(self._stage, parts, shapes)
        return self._exchanges[matrices]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Takes a matrix [rows, columns] of singular value decomposition U S V^T and returns nearly U V^T, with singular
    values between about 0.7 and 1.2: `steps` of the quintic Newton-Schulz iteration (Jordan et al. 2024), in the dtype
    of `matrix`."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPSILON)  # the Frobenius norm is at least the largest singular value
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def adjustment(rule: LrAdjust, shape: Sequence[int]) -> float:
    """Returns the factor of a matrix's rate. `original` is Jordan's sqrt(rows / columns), at least 1. `match_rms_adamw`
    is 0.2 sqrt(the longer side), which makes updates as large as AdamW's (arXiv 2502.16982, section 2.2)."""
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))

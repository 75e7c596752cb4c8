"""Bytes that the optimizers keep and make in a step, for the planner: of each optimizer the formula of what its file
beside this one does. Without torch.

A step makes most for one parameter, one group of parameters or one round of matrices; `rounds` cuts them as the
optimizers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallel3d.optimizers.assignment import WIDE_ELEMENTS, orthogonalize_cost, owners_of, rounds


@dataclass(frozen=True)
class SteppedPart:
    """A rank's part of one parameter: its numbers, the `columns` of a matrix (1 for a vector), and the numbers of the
    parameter on all data ranks of this tp rank."""

    numel: int
    columns: int
    whole: int


def narrow_step_bytes(is_sgd: bool, *, state_bytes: int, master_bytes: int, rounds_stochastically: bool) -> float:
    """Bytes that AdamW, or SGD, makes for each number of the parameter that it steps. Where states are of another dtype
    than the parameter, `low_precision_state` widens the gradient and each state to float32; torch's own AdamW steps in
    place, and its SGD makes the change."""
    is_wide = master_bytes == 4 or rounds_stochastically
    if is_sgd:
        return (8.0 if is_wide else 16.0) if state_bytes != master_bytes else 4.0 if is_wide else 2.0
    return (8.0 if is_wide else 16.0) if state_bytes != master_bytes else 0.0


def adafactor_state_bytes(parts: Iterable[SteppedPart]) -> int:
    """Bytes of Adafactor's float32 states: of a matrix a mean for each row here and each column, of a vector as many as
    it has."""
    return 4 * sum(part.numel if part.columns == 1 else part.numel // part.columns + part.columns for part in parts)


def adafactor_step_bytes(parts: Iterable[SteppedPart], *, shards: int, is_narrow: bool) -> float:
    """The float32 updates of a round; with 16-bit parameters (`is_narrow`) also the gradients, widened, and then one
    parameter after the other."""
    each = sorted(parts, key=lambda part: part.columns == 1)  # matrices first
    sizes = ([part.numel for part in some] for some in rounds(each, lambda part: part.whole / shards))
    return max((sum(some) * (8 if is_narrow else 4) + 4 * is_narrow * max(some) for some in sizes), default=0.0)


def rounded_step_bytes(
    parts: Iterable[SteppedPart], *, tp: int, shards: int, states: int, step_bytes: float | None
) -> float:
    """A step of bf16 parameters in float32 (`stochastic_rounding`): a group of them is widened with its gradients and
    its `states` of 16 bits, then stepped, which makes `step_bytes` for each number of one of them (None: as Adafactor),
    then rounded one after the other."""
    wide, rounding = 8 + 2 * states, 10  # bytes of a number; the noise, its sum with the wide number, and the result
    most = 0.0
    for group in rounds(parts, lambda part: part.whole * tp, most=WIDE_ELEMENTS):
        sizes = [part.numel for part in group]
        left = float(wide * sum(sizes))
        if step_bytes is None:
            most = max(most, left + adafactor_step_bytes(group, shards=shards, is_narrow=False))
        else:
            most = max(most, left + step_bytes * max(sizes))
        for size in sizes:
            most = max(most, left + rounding * size)
            left -= wide * size
    return most


@dataclass(frozen=True)
class MuonMatrix:
    """A matrix that the ranks of a stage hold together: its whole shape, the ranks that hold different parts of it, and
    this rank's numbers."""

    rows: int
    columns: int
    parts: int
    own: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class MuonCosts:
    """How Muon steps its matrices. All else is stepped by AdamW."""

    state_bytes: int  # bytes of a number's momentum
    item_bytes: int  # in which matrices are sent and made orthogonal
    nesterov: bool
    iterations: int


@lru_cache(maxsize=1024)
def muon_step_bytes(matrices: tuple[MuonMatrix, ...], *, ranks: int, step: MuonCosts, is_narrow: bool) -> float:
    """Bytes at most on the first of the `ranks` of a stage, which owns the dearest matrix of each round. It counts all
    of a rank's parts as sent. `is_narrow`: parameters of 16 bits."""
    found = (_round_bytes(some, ranks, step, is_narrow=is_narrow) for some in _matrix_rounds(matrices))
    return max(found, default=0.0)


def _round_bytes(matrices: Sequence[MuonMatrix], ranks: int, step: MuonCosts, *, is_narrow: bool) -> float:
    own, item = sum(matrix.own for matrix in matrices), step.item_bytes
    largest = max(matrices, key=lambda matrix: matrix.own).own
    wide = 4.0 * largest * (step.nesterov + is_narrow + (step.state_bytes < 4))  # the momentum's float32 temporaries
    has_copy = item < 4 or step.nesterov or step.state_bytes < 4
    parts = float(item * own * has_copy)  # what is to be made orthogonal of this rank's matrices
    applying = (4.0 * (item < 4) + 4.0 * is_narrow) * largest
    if ranks == 1:
        whole = max(item * (2 * matrix.numel + 2 * min(matrix.shape) ** 2) for matrix in matrices)
        return parts + max(wide, whole, applying)
    owners = owners_of([matrix.shape for matrix in matrices], ranks)
    owned = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == 0]
    whole = item * sum(matrix.numel for matrix in owned)
    iterating = max((item * (2 * matrix.numel + 2 * min(matrix.shape) ** 2) for matrix in owned), default=0)
    results = sum(item * matrix.numel * ranks / matrix.parts for matrix in owned)  # for all that hold a part
    sent, updates = item * own, item * own
    exchanging = parts + whole + max(sent, whole)
    return max(parts + wide, exchanging, whole + iterating, whole + results + max(results, updates), updates + applying)


@lru_cache(maxsize=1024)
def busiest_shapes(matrices: tuple[MuonMatrix, ...], *, ranks: int) -> tuple[tuple[int, int], ...]:
    """The shapes of the matrices that are made orthogonal one after the other: of each round its busiest rank's."""
    found: list[tuple[int, int]] = []
    for some in _matrix_rounds(matrices):
        owned: dict[int, list[tuple[int, int]]] = {}
        for matrix, owner in zip(some, owners_of([matrix.shape for matrix in some], ranks), strict=True):
            owned.setdefault(owner, []).append(matrix.shape)
        found += max(owned.values(), key=lambda shapes: sum(map(orthogonalize_cost, shapes)))
    return tuple(found)


def _matrix_rounds(matrices: Iterable[MuonMatrix]) -> Iterator[list[MuonMatrix]]:
    return rounds(matrices, lambda matrix: matrix.numel / matrix.parts)

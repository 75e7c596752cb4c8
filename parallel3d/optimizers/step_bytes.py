"""How an optimizer divides work that makes large temporary tensors, a few parameters at a time and
each whole matrix on one of the ranks, and the bytes that the optimizers keep and make in a step. No
torch: the planner computes with both.

A step makes most for one parameter, one group of parameters or one round of matrices. The formula
of an optimizer says what its file beside this one does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from typing import TypeVar

ROUND_ELEMENTS = 2**25  # in one round, of the parts of one rank

T = TypeVar("T")


def runs(
    items: Iterable[T], elements_of: Callable[[T], float], *, most: float
) -> Iterator[list[T]]:
    """Yields runs of items of at most `most` elements together, or a single larger item, so that a
    step's temporary tensors take little memory. All ranks get the same runs if they give the same
    items and `elements_of`."""
    run: list[T] = []
    elements = 0.0
    for item in items:
        if run and elements + elements_of(item) > most:
            yield run
            run, elements = [], 0.0
        run.append(item)
        elements += elements_of(item)
    if run:
        yield run


def assign_by_cost(costs: Sequence[float], ranks: int) -> list[int]:
    """Returns the rank of each item. The dearest items are assigned first, each to the rank with
    the lowest cost so far (the first of several)."""
    # a heap; more ranks would get nothing
    loads = [(0.0, rank) for rank in range(min(ranks, len(costs)))]
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, owners[item] = loads[0]
        heapreplace(loads, (load + costs[item], owners[item]))
    return owners


def owners_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Returns the rank that makes each of these matrices orthogonal."""
    return assign_by_cost([orthogonalize_cost(shape) for shape in shapes], ranks)


def orthogonalize_cost(shape: Sequence[int]) -> float:
    """Returns half the FLOPs of a step of Muon's iteration: two products of [short, short] by
    [short, long], one of [short, short] by [short, short]."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))


def elementwise_step_bytes(*, is_sgd: bool, state_bytes: int, master_bytes: int) -> float:
    """Bytes that a step of AdamW or SGD makes for each element of the largest parameter. torch's
    AdamW steps in place, and its SGD makes the change. States of another dtype than the parameter
    are stepped in float32 (`low_precision`), for which the narrower of the two are widened."""
    if state_bytes == master_bytes:
        return float(master_bytes) if is_sgd else 0.0
    change = 4.0 if is_sgd else 0.0
    if master_bytes == 2:
        return change + 8.0  # the parameter and its gradient
    return change + (4.0 if is_sgd else 8.0)  # the states


@dataclass(frozen=True)
class MuonMatrix:
    """A matrix that the ranks of a stage hold together: its whole shape, the ranks that hold
    different parts of it, and this rank's numbers."""

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
def muon_step_bytes(
    matrices: tuple[MuonMatrix, ...], *, ranks: int, step: MuonCosts, is_narrow: bool
) -> float:
    """Bytes at most on the first of the `ranks` of a stage, which owns the dearest matrix of each
    round. It counts all of a rank's parts as sent. `is_narrow`: parameters of 16 bits."""
    item, most = step.item_bytes, 0.0
    has_copy = item < 4 or step.nesterov or step.state_bytes < 4
    for some in _matrix_rounds(matrices):
        own, largest = sum(matrix.own for matrix in some), max(matrix.own for matrix in some)
        # the momentum's temporaries
        wide = 4.0 * largest * (step.nesterov + is_narrow + (step.state_bytes < 4))
        # what is to be made orthogonal of this rank's matrices
        parts = float(item * own * has_copy)
        applying = (4.0 * (item < 4) + 4.0 * is_narrow) * largest
        owners = owners_of([matrix.shape for matrix in some], ranks)
        owned = [matrix for matrix, owner in zip(some, owners, strict=True) if owner == 0]
        working = [2 * matrix.numel + 2 * min(matrix.shape) ** 2 for matrix in owned]
        iterating = item * max(working, default=0)
        if ranks == 1:
            most = max(most, parts + max(wide, iterating, applying))
            continue
        sent = item * own
        whole = item * sum(matrix.numel for matrix in owned)
        # for all that hold a part
        results = sum(item * matrix.numel * ranks / matrix.parts for matrix in owned)
        exchanging = parts + whole + max(sent, whole)
        scattering = whole + results + max(results, sent)
        most = max(most, parts + wide, exchanging, whole + iterating, scattering, sent + applying)
    return most


@lru_cache(maxsize=1024)
def busiest_shapes(matrices: tuple[MuonMatrix, ...], *, ranks: int) -> tuple[tuple[int, int], ...]:
    """The shapes of the matrices that are made orthogonal one after the other: of each round its
    busiest rank's."""
    found: list[tuple[int, int]] = []
    for some in _matrix_rounds(matrices):
        shapes = [matrix.shape for matrix in some]
        owned = defaultdict(list)
        for shape, owner in zip(shapes, owners_of(shapes, ranks), strict=True):
            owned[owner].append(shape)
        found += max(owned.values(), key=lambda shapes: sum(map(orthogonalize_cost, shapes)))
    return tuple(found)


def _matrix_rounds(matrices: Iterable[MuonMatrix]) -> Iterator[list[MuonMatrix]]:
    return runs(matrices, lambda each: each.numel / each.parts, most=ROUND_ELEMENTS)

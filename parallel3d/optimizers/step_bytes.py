"""How an optimizer divides work that makes large temporary tensors, a few parameters at a time and
each whole matrix on one of the ranks, and the bytes that the optimizers keep and make in a step. No
torch: the planner computes with both.

A step makes most for one parameter, one group of parameters or one round of matrices. The formula
of an optimizer says what its file beside this one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
        more = elements_of(item)
        if run and elements + more > most:
            yield run
            run = []
            elements = 0.0
        run.append(item)
        elements += more
    if run:
        yield run


def owners_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Returns the rank that makes each of these matrices orthogonal. The most costly matrices are
    assigned first, each to the rank with the lowest cost so far (the first of several)."""
    costs = []
    for short, long in map(sorted, shapes):
        # half the FLOPs of a step of Muon's iteration: two products of [short, short] by [short,
        # long], one of [short, short] by [short, short]
        costs.append(short * short * (2 * long + short))
    loads = [0] * min(ranks, len(shapes))
    owners = [0] * len(shapes)
    for item in sorted(range(len(shapes)), key=lambda item: -costs[item]):
        owner = loads.index(min(loads))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


def elementwise_step_bytes(*, is_sgd: bool, state_bytes: int, master_bytes: int) -> float:
    """Bytes at most that a step of AdamW or SGD makes for each element of the largest parameter.
    torch's AdamW steps in place, and its SGD makes the change. States of another dtype than the
    parameter are stepped in float32 (`low_precision`), for which tensors are widened."""
    change = 4.0 if is_sgd else 0.0
    return change if state_bytes == master_bytes else change + 8.0


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
    iterations: int


@lru_cache(maxsize=1024)
def muon_step_bytes(matrices: tuple[MuonMatrix, ...], *, ranks: int, step: MuonCosts) -> float:
    """Bytes at most on the first of the `ranks` of a stage, which owns the most costly matrix of
    each round. It counts all of a rank's parts as sent, and three float32 copies of the largest."""
    item = step.item_bytes
    most = 0.0
    for some, owned in _rounds_of_first(matrices, ranks):
        sent = item * sum(matrix.own for matrix in some)
        wide = 12 * max(matrix.own for matrix in some)
        full = item * sum(matrix.numel for matrix in owned)
        iterating = 2 * item * max(each.numel + min(each.shape) ** 2 for each in owned)
        if ranks == 1:
            most = max(most, sent + max(wide, iterating))
            continue
        # for all that hold a part
        results = item * sum(matrix.numel * ranks / matrix.parts for matrix in owned)
        exchanging = sent + max(sent, full)
        scattering = results + max(results, sent)
        busiest = max(exchanging, iterating, scattering)
        most = max(most, sent + wide, full + busiest)
    return most


@lru_cache(maxsize=1024)
def busiest_shapes(matrices: tuple[MuonMatrix, ...], *, ranks: int) -> tuple[tuple[int, int], ...]:
    """The shapes of the matrices that the first rank of a stage makes orthogonal one after the
    other. No rank is much busier."""
    rounds = _rounds_of_first(matrices, ranks)
    return tuple(matrix.shape for _, owned in rounds for matrix in owned)


def _rounds_of_first(
    matrices: Iterable[MuonMatrix], ranks: int
) -> Iterator[tuple[list[MuonMatrix], list[MuonMatrix]]]:
    """Yields the matrices of each round, and those of them that the first rank owns."""
    for some in runs(matrices, lambda each: each.numel / each.parts, most=ROUND_ELEMENTS):
        owners = owners_of([matrix.shape for matrix in some], ranks)
        pairs = zip(some, owners, strict=True)
        yield some, [matrix for matrix, owner in pairs if owner == 0]

"""How an optimizer divides work that makes large temporary tensors: a few parameters at a time, and each whole matrix
on one of the ranks. No torch: the planner prices the same shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapreplace
from typing import TypeVar

ROUND_ELEMENTS = 2**25  # in one round, of the parts of one rank
WIDE_ELEMENTS = 2**26  # over all ranks, of the parameters that `stochastic_rounding` widens at a time

T = TypeVar("T")


def rounds(items: Iterable[T], elements_of: Callable[[T], float], *, most: int = ROUND_ELEMENTS) -> Iterator[list[T]]:
    """Yields a few items at a time, about `most` elements, so that a step's temporary tensors take little memory. All
    ranks get the same rounds if they give the same items and `elements_of`."""
    found: list[T] = []
    elements = 0.0
    for item in items:
        found.append(item)
        elements += elements_of(item)
        if elements >= most:
            yield found
            found, elements = [], 0.0
    if found:
        yield found


def assign_by_cost(costs: Sequence[float], ranks: int) -> list[int]:
    """Returns the rank of each item. The dearest items are assigned first, each to the rank with the lowest cost so far
    (the first of several)."""
    loads = [(0.0, rank) for rank in range(min(ranks, len(costs)))]  # a heap; more ranks would get nothing
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, owners[item] = loads[0]
        heapreplace(loads, (load + costs[item], owners[item]))
    return owners


def owners_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Returns the rank that makes each of these matrices orthogonal."""
    return assign_by_cost([orthogonalize_cost(shape) for shape in shapes], ranks)


def orthogonalize_cost(shape: Sequence[int]) -> float:
    """Returns half the FLOPs of a step of Muon's iteration: two products of [short, short] by [short, long], one of
    [short, short] by [short, short]."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))

"""How an optimizer takes parameters of which it makes much: a few at a time, and whole matrices each on one of the
ranks. No torch: the planner prices the same shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapreplace
from typing import TypeVar

ROUND_ELEMENTS = 2**25  # of a rank's part
WIDE_ELEMENTS = 2**26  # over all ranks, of parameters that are float32 for a moment (`optimizers.stochastic_rounding`)

T = TypeVar("T")


def rounds(items: Iterable[T], elements_of: Callable[[T], float], *, most: int = ROUND_ELEMENTS) -> Iterator[list[T]]:
    """A few at a time, so that what a step makes of them takes little memory: `most` elements or so. Cut alike on all
    ranks, where the items are and `elements_of` is."""
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
    """The rank of each item: the dearest first, each to the rank that has least so far, of several the first."""
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
    """Half the FLOPs of a step of Muon's iteration: two products of [short, short] by [short, long], one of
    [short, short] by [short, short]."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))

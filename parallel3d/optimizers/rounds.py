"""Divides the work of an optimizer that needs large temporary tensors.

It processes a few parameters at a time, a round, and each matrix on one rank. The module does not
import torch, because the planner (`planner.model.muon`) counts the bytes of the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

# Maximum number of elements of a rank's parts in a round, unless a single part is larger.
ROUND_ELEMENTS = 2**25

T = TypeVar("T")


def runs(
    items: Iterable[T], elements_of: Callable[[T], float], *, most: float
) -> Iterator[list[T]]:
    """Yields runs of items with at most `most` elements in total, or one larger item.

    This limits temporary memory. Ranks with equal items and `elements_of` get the same runs.
    """
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
    """Returns the rank that orthogonalizes each matrix.

    Assigns matrices in descending order of cost, each to the first rank with the lowest load.
    """
    costs = []
    for short, long in map(sorted, shapes):
        # Half the FLOPs of an iteration: two matmuls [short, short] x [short, long] and one [short,
        # short] x [short, short].
        costs.append(short * short * (2 * long + short))
    loads = [0] * min(ranks, len(shapes))
    owners = [0] * len(shapes)
    for item in sorted(range(len(shapes)), key=lambda item: -costs[item]):
        owner = loads.index(min(loads))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners

"""How an optimizer divides work that makes large temporary tensors: a few parameters at a time, and
each whole matrix on one of the ranks. No torch: the planner counts the bytes of a step by the same
rounds (`planner.model.muon`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

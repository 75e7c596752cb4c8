"""How far a model, a cluster, a sequence or a batch goes: the smallest or largest that still fits.

`one_that_fits` is much quicker than the search for the best, so each answer tries a few dozen
requests. It comes with a layout that fits, which is not the fastest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.search.fastest import one_that_fits
from parallel3d.planner.search.request import Fixed, PlanRequest, Strategy
from parallel3d.planner.search.space import MOST_MICROBATCH
from parallel3d.shard_sizes import divisors

_STEPS = 16  # between two doublings
_MOST_DOUBLINGS = 16  # of a node
_SHORTEST = 128  # tokens
_LONGEST = 2**24


def smallest_cluster(request: PlanRequest) -> Strategy | None:
    """Finds the fewest devices that hold the model: parts of a node, then whole nodes; beyond 16
    nodes in steps of a 32nd to a 16th. Returns None if no number of them does, because the memory
    of one sequence is not divided far enough."""
    node = request.cluster.gpus_per_node
    sizes = divisors(node)
    sizes += [node * 2**doublings for doublings in range(1, _MOST_DOUBLINGS + 1)]
    found = _first_that_fits(replace(request, gpus=gpus) for gpus in sizes)
    if found is None or found.request.gpus <= node:
        return found
    gpus = found.request.gpus
    step = max(1, gpus // node // 2 // _STEPS) * node
    fewer = range(gpus // 2 + step, gpus, step)
    return _first_that_fits(replace(request, gpus=gpus) for gpus in fewer) or found


def longest_sequence(request: PlanRequest) -> Strategy | None:
    """Finds the longest sequence that fits, to a 16th of a power of 2. A learned position table
    limits it."""
    rows = _LONGEST
    if request.shape.positions == "learned":
        rows = request.shape.position_rows
    lengths: list[int] = []
    power = _SHORTEST
    while power <= rows:
        lengths += range(power, min(2 * power, rows + 1), power // _STEPS)
        power *= 2

    def layout_of(seq_len: int) -> Strategy | None:
        return one_that_fits(replace(request, seq_len=seq_len))

    fitting = bisect_right(lengths, False, key=lambda length: layout_of(length) is None)
    return layout_of(lengths[fitting - 1]) if fitting else None


def largest_batch(request: PlanRequest) -> Strategy | None:
    """Finds the most sequences that all data ranks together take at once, without accumulating
    gradients. Any larger batch fits too, as several microbatches, because the memory does not grow
    with their number."""
    fixed = request.fixed
    replicas = fixed.dp_replicate or 1
    microbatches = divisors(MOST_MICROBATCH)
    if fixed.microbatch_size is not None:
        microbatches = [fixed.microbatch_size]
    choices = product(divisors(request.gpus // replicas), microbatches)
    for shards, microbatch in sorted(choices, key=prod, reverse=True):
        if fixed.dp_shard not in (None, shards):
            continue
        batch = shards * replicas * microbatch
        at_once = replace(fixed, dp_shard=shards, dp_replicate=replicas, microbatch_size=microbatch)
        found = one_that_fits(replace(request, global_batch_size=batch, fixed=at_once))
        if found is not None:
            return Strategy(replace(found.request, fixed=fixed), found.parallel)
    return None


def largest_model(request: PlanRequest, shapes: Iterable[ModelShape]) -> Strategy | None:
    """Finds the largest of these models that fits and has the positions for the sequence."""
    requests = []
    for shape in sorted(shapes, key=total_parameters, reverse=True):
        if shape.positions != "learned" or shape.position_rows >= request.seq_len:
            requests.append(replace(request, shape=shape))
    return _first_that_fits(requests)


def remedies(request: PlanRequest) -> Iterator[str]:
    """Yields, in words, what makes a layout fit if none does; each was tried."""
    found = smallest_cluster(request)
    if found is not None and found.request.gpus > request.gpus:
        yield f"{found.request.gpus} devices instead of {request.gpus}"
    length = request.seq_len // 2
    while length >= 512:
        if one_that_fits(replace(request, seq_len=length)) is not None:
            yield f"sequences of {length} tokens instead of {request.seq_len}"
            break
        length //= 2
    if one_that_fits(replace(request, fixed=Fixed())) is not None:
        yield "leaving free what is fixed"


def _first_that_fits(requests: Iterable[PlanRequest]) -> Strategy | None:
    """Returns a layout that fits for the first request that has one."""
    return next(filter(None, map(one_that_fits, requests)), None)

"""The smallest cluster, longest sequence, largest batch or largest model that fits.

Sequence lengths and numbers of nodes are tried in steps of at most 1/16. The resulting layout fits
but need not be the fastest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.search.best_layouts import one_that_fits
from parallel3d.planner.search.request import Fixed, PlanRequest, Strategy
from parallel3d.planner.search.space import MOST_MICROBATCH
from parallel3d.shard_sizes import divisors

_LONGEST = 2**24  # Longest sequence that is tried, in tokens.


def smallest_cluster(request: PlanRequest) -> Strategy | None:
    """Finds the smallest number of devices that fits: a divisor of a node's devices, or full nodes.

    Returns None if 65,536 nodes do not suffice, for example because one sequence is too long.
    """
    node = request.cluster.gpus_per_node
    sizes = divisors(node)
    sizes += [node * nodes for nodes in _sizes(2, 2**16)]
    return _first_that_fits(replace(request, gpus=gpus) for gpus in sizes)


def longest_sequence(request: PlanRequest) -> Strategy | None:
    """Finds the longest sequence that fits, at most a learned position table or 2**24 tokens."""
    sizes = _sizes(128, _most_tokens(request.shape))
    requests = [replace(request, seq_len=size) for size in sizes]
    fitting = bisect_right(requests, False, key=lambda each: one_that_fits(each) is None)
    return one_that_fits(requests[fitting - 1]) if fitting else None


def largest_batch(request: PlanRequest) -> Strategy | None:
    """Finds the largest global batch that fits with one microbatch per step.

    Larger batches fit with more microbatches, which do not need more memory.
    """
    fixed = request.fixed
    replicas = fixed.dp_replicate or 1
    microbatches = {*divisors(MOST_MICROBATCH), fixed.microbatch_size or 1}
    choices = product(divisors(request.gpus // replicas), microbatches)
    requests = []
    for shards, microbatch in sorted(choices, key=prod, reverse=True):
        if fixed.allows(dp_shard=shards, microbatch_size=microbatch):
            one = replace(fixed, dp_shard=shards, dp_replicate=replicas, microbatch_size=microbatch)
            batch = shards * replicas * microbatch
            requests.append(replace(request, global_batch_size=batch, fixed=one))
    return _first_that_fits(requests)


def largest_model(request: PlanRequest, shapes: Iterable[ModelShape]) -> Strategy | None:
    """Finds the largest of these models that fits and supports the sequence length."""
    largest_first = sorted(shapes, key=total_parameters, reverse=True)
    long = [shape for shape in largest_first if _most_tokens(shape) >= request.seq_len]
    return _first_that_fits(replace(request, shape=shape) for shape in long)


def remedies(request: PlanRequest) -> Iterator[str]:
    """Yields single changes of the request, each checked to make some layout fit."""
    cluster = smallest_cluster(request)
    if cluster:
        yield f"{cluster.request.gpus} devices instead of {request.gpus}"
    sequence = longest_sequence(request)
    if sequence:
        yield f"sequences of {sequence.request.seq_len} tokens instead of {request.seq_len}"
    if one_that_fits(replace(request, fixed=Fixed())):
        yield "removing the fixed options"


def _sizes(least: int, most: int) -> list[int]:
    """Returns increasing integers from `least` to `most`. A step is 1, or 1/16."""
    sizes: list[int] = []
    power = least
    while power <= most:
        sizes += range(power, min(2 * power, most + 1), max(1, power // 16))
        power *= 2
    return sizes


def _most_tokens(shape: ModelShape) -> int:
    return shape.position_rows or _LONGEST


def _first_that_fits(requests: Iterable[PlanRequest]) -> Strategy | None:
    """Returns a layout that fits for the first request that has one, or None."""
    return next(filter(None, map(one_that_fits, requests)), None)

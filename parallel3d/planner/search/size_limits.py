"""How far a model, a cluster, a sequence or a batch goes: the smallest or largest that still fits,
each tried.

Whether anything fits is known much sooner than what is best (`search.one_that_fits`), so each
answer is a search of a few dozen such requests: by doubling, then between the last two. It comes
with a layout that fits, not the fastest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.search.fastest import one_that_fits
from parallel3d.planner.search.request import Fixed, PlanRequest, Strategy
from parallel3d.planner.search.space import MOST_MICROBATCH
from parallel3d.shard_sizes import divisors

_STEPS = 16  # between two doublings
_MOST_DOUBLINGS = 16  # of a node
_LONGEST = 2**24  # tokens
_SHORTEST = 128


def smallest_cluster(request: PlanRequest) -> Strategy | None:
    """Finds the fewest devices that hold the model: parts of a node, then whole nodes. Beyond 16
    nodes in steps of a 32nd to a 16th. None where no number of them does, since what one sequence
    needs is not divided far enough."""
    node = request.cluster.gpus_per_node
    sizes = divisors(node)
    sizes += [node * 2**doublings for doublings in range(1, _MOST_DOUBLINGS + 1)]
    found = _first_that_fits(replace(request, gpus=gpus) for gpus in sizes)
    if found is None or found.request.gpus <= node:
        return found
    nodes = found.request.gpus // node
    step = max(1, nodes // 2 // _STEPS)
    fewer = range(nodes // 2 + step, nodes, step)
    return _first_that_fits(replace(request, gpus=count * node) for count in fewer) or found


def longest_sequence(request: PlanRequest) -> Strategy | None:
    """Finds the longest sequence that fits, by doublings or halves, then 16ths; a learned position
    table ends it."""
    rows = _LONGEST
    if request.shape.positions == "learned":
        rows = request.shape.position_rows
    length = min(request.seq_len, rows)

    def tried(tokens: int) -> Strategy | None:
        if tokens <= rows:
            return one_that_fits(replace(request, seq_len=tokens))
        return None

    while length >= _SHORTEST and tried(length) is None:
        length //= 2
    if length < _SHORTEST:
        return None
    while tried(2 * length) is not None:
        length *= 2
    lengths = range(length, 2 * length, length // _STEPS)
    fitting = bisect_right(lengths, False, key=lambda each: tried(each) is None)
    return tried(lengths[fitting - 1])


def largest_batch(request: PlanRequest) -> Strategy | None:
    """Finds the most sequences that all data ranks together take at once, without accumulating
    gradients: any larger batch fits too, as several microbatches, since what a device holds does
    not grow with their number."""
    best: Strategy | None = None
    most = 0
    fixed = request.fixed
    replicas = fixed.dp_replicate or 1
    microbatches = divisors(MOST_MICROBATCH)
    if fixed.microbatch_size is not None:
        microbatches = [fixed.microbatch_size]
    for dp in reversed(divisors(request.gpus)):
        shards = dp // replicas
        if dp % replicas or fixed.dp_shard not in (None, shards):
            continue
        for microbatch in microbatches:
            batch = dp * microbatch
            if batch <= most:
                continue
            ways = replace(
                fixed, dp_shard=shards, dp_replicate=replicas, microbatch_size=microbatch
            )
            found = one_that_fits(replace(request, global_batch_size=batch, fixed=ways))
            if found is None:
                break
            most = batch
            best = Strategy(replace(found.request, fixed=fixed), found.parallel)
    return best


def largest_model(request: PlanRequest, shapes: Iterable[ModelShape]) -> Strategy | None:
    """Finds the largest of these models that fits and has the positions for the sequence."""
    enough = (
        shape
        for shape in shapes
        if shape.positions != "learned" or shape.position_rows >= request.seq_len
    )
    largest_first = sorted(enough, key=total_parameters, reverse=True)
    return _first_that_fits(replace(request, shape=shape) for shape in largest_first)


def remedies(request: PlanRequest) -> Iterator[str]:
    """Yields, in words, what would make something fit where nothing does; each remedy was tried."""
    found = smallest_cluster(request)
    if found is not None and found.request.gpus > request.gpus:
        yield f"{found.request.gpus} devices instead of {request.gpus}"
    length = request.seq_len // 2
    while length >= 512 and one_that_fits(replace(request, seq_len=length)) is None:
        length //= 2
    if length >= 512:
        yield f"sequences of {length} tokens instead of {request.seq_len}"
    free = replace(request, fixed=Fixed())
    if free != request and one_that_fits(free) is not None:
        yield "leaving free what is fixed"


def _first_that_fits(requests: Iterable[PlanRequest]) -> Strategy | None:
    """Returns a layout that fits for the first request that has one."""
    for request in requests:
        found = one_that_fits(request)
        if found is not None:
            return found
    return None

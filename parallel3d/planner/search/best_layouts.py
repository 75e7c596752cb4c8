"""Finds the best layouts for a model on a cluster: the fastest, or those with the lowest memory.

The search is exhaustive over the layouts of `space`. For each combination of tp and pp, layouts are
searched in the order of their closed-form step time (`tp_pp_search`). Then the schedules of the
best candidates are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice
from math import inf
from operator import attrgetter
from typing import Any, Literal

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.search.request import Candidate, PlanRequest, PlanResult, Rejected, Strategy
from parallel3d.planner.search.space import check_fixed, families
from parallel3d.planner.search.ties import put_in_order, slowest_tied_s
from parallel3d.planner.search.tp_pp_search import TpPpSearch
from parallel3d.planner.time.step import BlockTimeCache

Objective = Literal["throughput", "memory"]
_KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
)


def search(
    request: PlanRequest, *, top: int = 10, objective: Objective = "throughput"
) -> PlanResult:
    """Searches for the best layouts, one for each tp x pp.

    If all candidates have the same tp and pp, "throughput" returns the best for each dp_shard,
    microbatch size and recompute.

    Args:
        request: Model, cluster and constraints.
        top: Maximum number of layouts.
        objective: "throughput" for the fastest layouts, "memory" for those with the lowest memory.

    Raises:
        ConfigError: No layout satisfies the request, regardless of memory.
    """
    check_fixed(request)
    searches = _searches(request)
    best, without = _best_by_closed_form(request, searches, top)
    strategies = _simulate(request, best)
    if objective == "memory":
        fitting = _lowest_memory_first(searches, within=request.usable_bytes)
        strategies = [Strategy(request, each.parallel) for each in fitting]
    rejected = tuple(_rejected(request, each) for each in _lowest_memory_first(without))
    if not strategies and not rejected:
        raise ConfigError(_no_layout(request))
    return PlanResult(
        strategies=tuple(strategies[:top]),
        rejected=rejected,
        checked=sum(each.checked for each in searches),
        priced=tuple(chain.from_iterable(each.priced for each in searches)),
        least_s=min((each.step_time_s for each in best), default=inf),
    )


def fastest_by_closed_form(request: PlanRequest, *, within_s: float) -> Candidate | None:
    """Returns the layout that fits with the lowest closed-form step time, at most `within_s`.

    Returns None if there is no such layout. Much faster than `search`.
    """
    found: Candidate | None = None
    for each in sorted(_searches(request), key=attrgetter("least_s")):
        found = next(each.fastest(within_s=within_s), found)
        if found:
            within_s = found.step_time_s
    return found


def one_that_fits(request: PlanRequest) -> Strategy | None:
    """Returns some layout that fits, or None. Much faster than `search`."""
    for each in _searches(request):
        found = each.lowest_memory(within=request.usable_bytes, is_any=True)
        if found:
            return Strategy(request, found.parallel)
    return None


def best_or_rule(request: PlanRequest) -> PlanResult | str:
    """Returns the result of `search` with at most one layout, or its error message."""
    try:
        return search(request, top=1)
    except ConfigError as error:
        return str(error)


def sweep(request: PlanRequest, sizes: Iterable[int]) -> dict[int, Strategy | str]:
    """Returns the best layout, or the reason why there is none, for each number of devices.

    Raises ConfigError if no layout satisfies the request at any size, regardless of memory.
    """
    found: dict[int, Strategy | str] = {}
    rules = []
    for gpus in sorted(set(sizes)):
        result = best_or_rule(replace(request, gpus=gpus))
        if isinstance(result, str):
            found[gpus] = result
            rules.append(result)
        elif result.strategies:
            found[gpus] = result.strategies[0]
        else:
            found[gpus] = f"does not fit: {result.rejected[0].reason}"
    if len(rules) == len(found):
        raise ConfigError(rules[-1])
    return found


def _searches(request: PlanRequest) -> list[TpPpSearch]:
    blocks: BlockTimeCache = {}
    return [TpPpSearch(request, own, blocks) for own in families(request)]


def _no_layout(request: PlanRequest) -> str:
    fixed = vars(request.fixed)
    asked = ", ".join(f"{key} = {value}" for key, value in fixed.items() if value is not None)
    return (
        f"no layout of {request.gpus} devices divides {request.shape.name} (layers "
        f"{request.shape.layers}, heads {request.shape.heads}, kv_heads {request.shape.kv_heads}) "
        f"and a batch of {request.global_batch_size} "
        f"sequences with {asked or 'nothing fixed'}; try another number of devices, a batch that "
        f"is a multiple of {request.gpus}, or fix fewer options"
    )


def _best_by_closed_form(
    request: PlanRequest, searches: list[TpPpSearch], top: int
) -> tuple[list[Candidate], list[TpPpSearch]]:
    """Returns candidates for the simulation, and the searches that found no layout that fits.

    Each tp x pp that may be among the `top` fastest, or tied with the fastest, adds its fastest and
    its preferred layout. If there is only one, it also adds its ties and `top` more.
    """
    best: list[Candidate] = []
    without = []
    times: list[float] = []
    for each in sorted(searches, key=attrgetter("least_s")):
        within_s = inf
        if len(times) > top:
            within_s = max(times[top], slowest_tied_s(times[0]))
        in_time = each.fastest(within_s=within_s)
        first = next(in_time, None)
        if first:
            times = sorted([*times, first.step_time_s])
            own = [first]
            for other in in_time:
                if other.step_time_s > slowest_tied_s(times[0]):
                    break
                own.append(other)
            best += {first, put_in_order(request, own)[0]}
            if len(searches) == 1:
                best += own + [*islice(in_time, top)]
        elif not each.waiting:
            without.append(each)
    return best, without


def _lowest_memory_first(searches: list[TpPpSearch], within: float = inf) -> list[Candidate]:
    found = filter(None, [each.lowest_memory(within=within) for each in searches])
    return sorted(found, key=attrgetter("bytes"))


def _simulate(request: PlanRequest, candidates: list[Candidate]) -> list[Strategy]:
    """Simulates the schedules of candidates and returns the best of each tp x pp, best first.

    If all have the same tp and pp, returns the best for each dp_shard, microbatch size and
    recompute.
    """
    exact = {}
    for each in candidates:
        found = Strategy(request, each.parallel)
        exact[each._replace(step_time_s=found.cost.step_time_s)] = found
    differs: attrgetter[Any] = attrgetter("tp", "pp")
    if len({differs(each.parallel) for each in candidates}) == 1:
        differs = attrgetter("dp_shard", "microbatch_size", "recompute")
    shown: dict[object, Strategy] = {}
    for each in put_in_order(request, exact):
        shown.setdefault(differs(each.parallel), exact[each])
    return [*shown.values()]


def _rejected(request: PlanRequest, lowest: Candidate) -> Rejected:
    memory = Strategy(request, lowest.parallel).memory
    short = lowest.bytes - request.usable_bytes
    largest = max(_KINDS, key=lambda kind: getattr(memory, kind))
    needs = f"needs {max(0.1, short / GIB):.1f} GiB more"
    reason = f"{needs} on rank {memory.rank}, mostly for {largest}"
    return Rejected(parallel=lowest.parallel, reason=reason, short_bytes=short)

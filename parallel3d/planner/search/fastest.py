"""The best layouts for a model on a cluster: the fastest, or those with the lowest memory.

The search goes through the whole space of `ParallelConfig` (`space`), each tp x pp in the order of
predicted step time (`tp_pp_search`). Times are those of a closed form first. The schedules of the
finalists are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Literal

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.search.request import Fixed, PlanRequest, PlanResult, Rejected, Strategy
from parallel3d.planner.search.space import check_fixed, families
from parallel3d.planner.search.ties import put_in_order, slowest_tied_s
from parallel3d.planner.search.tp_pp_search import Candidate, TpPpSearch
from parallel3d.planner.time.step import BlockTimeCache

Objective = Literal["throughput", "memory"]
_KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def search(
    request: PlanRequest, *, top: int = 10, objective: Objective = "throughput"
) -> PlanResult:
    """Returns the best `top` layouts, one of each tp x pp, because a run can change everything else
    without changing what its ranks hold. If the request fixes both tp and pp, layouts may differ in
    anything.

    Raises ConfigError if the request allows no layout, whatever the memory."""
    searches = _searches(request)
    best, without = _best_by_closed_form(request, searches, top)
    strategies = _simulate(request, best)
    if objective == "memory":
        fitting = [each.leanest(within=request.usable_bytes) for each in searches]
        lowest_first = sorted(filter(None, fitting), key=lambda each: each.bytes)
        strategies = [Strategy(request, each.parallel) for each in lowest_first]
    nearest = filter(None, [each.leanest() for each in without])
    rejected = [_rejected(request, each) for each in nearest]
    if not strategies and not rejected:
        raise _no_layout(request)
    return PlanResult(
        strategies=tuple(strategies[:top]),
        rejected=tuple(sorted(rejected, key=lambda each: each.short_bytes)),
        checked=sum(each.checked for each in searches),
        least_s=min((each.step_time_s for each in best), default=inf),
    )


def fastest(request: PlanRequest, *, top: int = 1) -> list[Strategy]:
    """Returns only the strategies of `search`. Raises ConfigError as `search` does."""
    return [*search(request, top=top).strategies]


def fastest_by_closed_form(request: PlanRequest, *, within_s: float = inf) -> Candidate | None:
    """Returns the fastest layout that fits, much sooner than `fastest`, or None if it takes longer
    than `within_s`."""
    found: Candidate | None = None
    for each in sorted(_searches(request), key=lambda each: each.least_s):
        found = next(each.fastest(within_s=within_s), found)
        if found is not None:
            within_s = found.step_time_s
    return found


def one_that_fits(request: PlanRequest) -> Strategy | None:
    """Returns any layout that fits, much sooner than the best. Returns None if there is none."""
    for each in _searches(request):
        found = each.leanest(within=request.usable_bytes, is_any=True)
        if found is not None:
            return Strategy(request, found.parallel)
    return None


def compare(request: PlanRequest, wanted: Fixed) -> PlanResult | str:
    """Returns the best layouts with `wanted` instead of what is fixed, or the rule that `wanted`
    breaks."""
    try:
        other = replace(request, fixed=wanted)
        check_fixed(other)
        return search(other, top=1)
    except ConfigError as error:
        return str(error)


def sweep(request: PlanRequest, sizes: Iterable[int]) -> dict[int, Strategy | str]:
    """Returns the best layout on each number of devices, smallest first, or the reason why none
    fits. Raises ConfigError if the request allows no layout at any size, whatever the memory."""
    found: dict[int, Strategy | str] = {}
    has_layouts = False
    for gpus in sorted(set(sizes)):
        result = compare(replace(request, gpus=gpus), request.fixed)
        if isinstance(result, str):
            found[gpus] = result
            continue
        has_layouts = True
        if result.strategies:
            found[gpus] = result.strategies[0]
        else:
            short = result.rejected[0].short_bytes / GIB
            found[gpus] = f"does not fit: the nearest layout needs {short:.1f} GiB more"
    if not has_layouts:
        raise ConfigError(str(found.popitem()[1]))
    return found


def _searches(request: PlanRequest) -> list[TpPpSearch]:
    blocks: BlockTimeCache = {}
    found = families(request)
    return [TpPpSearch(request, *sizes, own, blocks) for sizes, own in found.items()]


def _no_layout(request: PlanRequest) -> ConfigError:
    shape = request.shape
    fixed = vars(request.fixed).items()
    asked = ", ".join(f"{key} = {value}" for key, value in fixed if value is not None)
    return ConfigError(
        f"no layout of {request.gpus} devices divides {shape.name} (layers {shape.layers}, heads "
        f"{shape.heads}, kv_heads {shape.kv_heads}) and a batch of {request.global_batch_size} "
        f"sequences ({asked or 'nothing fixed'}); try another number of devices, or a batch that "
        f"is a multiple of {request.gpus}"
    )


def _best_by_closed_form(
    request: PlanRequest, searches: list[TpPpSearch], top: int
) -> tuple[list[Candidate], list[TpPpSearch]]:
    """Returns the fastest layout and the preferred one of each tp x pp that is among the fastest or
    tied with them, and the tp x pp without a layout that fits."""
    best: list[Candidate] = []
    without = []
    times: list[float] = []
    for each in sorted(searches, key=lambda each: each.least_s):
        within_s = inf
        if len(times) > top:
            within_s = max(times[top], slowest_tied_s(times[0]))
        in_time = each.fastest(within_s=within_s)
        first = next(in_time, None)
        if first is not None:
            times = sorted([*times, first.step_time_s])
            own = [first]
            for other in in_time:
                if other.step_time_s > slowest_tied_s(times[0]):
                    break
                own.append(other)
            best += {first, put_in_order(request, own)[0]}
            if len(searches) == 1:
                best += own + [*islice(in_time, top)]
        elif not each.is_cut_short:
            without.append(each)
    return best, without


def _simulate(request: PlanRequest, candidates: list[Candidate]) -> list[Strategy]:
    """Simulates the schedules of candidates, and returns the best of each tp x pp, the best first.
    If there is only one tp x pp, layouts differ in the use of the data-parallel ranks."""
    exact: dict[Candidate, Strategy] = {}
    for each in candidates:
        found = Strategy(request, each.parallel)
        exact[each._replace(step_time_s=found.cost.step_time_s)] = found
    several = len({(each.parallel.tp, each.parallel.pp) for each in candidates}) > 1
    shown: dict[object, Strategy] = {}
    for each in put_in_order(request, exact):
        parallel = each.parallel
        differs: object = (parallel.tp, parallel.pp)
        if not several:
            differs = (parallel.dp_shard, parallel.microbatch_size, parallel.recompute)
        shown.setdefault(differs, exact[each])
    return [*shown.values()]


def _rejected(request: PlanRequest, lowest: Candidate) -> Rejected:
    memory = Strategy(request, lowest.parallel).memory
    short = lowest.bytes - request.usable_bytes
    largest = max(_KINDS, key=lambda kind: getattr(memory, kind))
    needs = f"needs {max(0.1, short / GIB):.1f} GiB more on rank {memory.rank}"
    reason = f"{needs}, most for {largest}"
    return Rejected(parallel=lowest.parallel, reason=reason, short_bytes=short)

"""The best layouts for a model on a cluster, the fastest or those with the lowest memory:
the whole space of `ParallelConfig` (`space`), each tp x pp in the order of predicted step time
(`tp_pp_search`): by a closed form first, the finalists by simulating their schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Literal

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, ROUNDED
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.training import master_bytes
from parallel3d.planner.search.request import Fixed, PlanRequest, PlanResult, Rejected, Strategy
from parallel3d.planner.search.space import check_fixed, families
from parallel3d.planner.search.ties import settled
from parallel3d.planner.search.tp_pp_search import Candidate, TpPpSearch
from parallel3d.planner.time.step import BlockTimeCache

Objective = Literal["throughput", "memory"]
_KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
_FINALISTS = 20
_TIED = 4  # ways of cutting a model that may be as fast as the fastest
_FROM_EACH_WAY = 2
_SPARE_WAYS = 2


def search(
    request: PlanRequest, *, top: int = 10, objective: Objective = "throughput"
) -> PlanResult:
    """The best `top` strategies, each another way of cutting the model: of every tp x pp the best
    that there is in microbatch, virtual stages, split of the data ranks and recompute, which a run
    can change without changing what its ranks hold. Where the request fixes both tp and pp, those
    are what differs.

    Raises ConfigError where the request allows no layout at all, whatever the memory."""
    searches = _searches(request)
    found, best = _fastest(request, searches, top)
    rejected = []
    for each in searches:
        if each in best or each.is_cut_short:
            continue
        least = each.leanest()
        if least is None:
            continue
        memory = Strategy(request, least.parallel).memory
        short = least.bytes - request.usable_bytes
        needs = "under 0.1"
        if short >= 0.05 * GIB:
            needs = f"{short / GIB:.1f}"
        largest = max(_KINDS, key=lambda kind: getattr(memory, kind))
        why = f"needs {needs} GiB more on rank {memory.rank}, most for {largest}"
        rejected.append(Rejected(parallel=least.parallel, reason=why, short_bytes=short))
    if objective == "memory" and found:
        found = _leanest(request, searches, top)
    return PlanResult(
        strategies=tuple(found),
        rejected=tuple(sorted(rejected, key=lambda each: each.short_bytes)),
        checked=sum(each.checked for each in searches),
    )


def fastest(request: PlanRequest, *, top: int = 1) -> list[Strategy]:
    """Returns the strategies of `search` alone. Raises ConfigError as `search` does."""
    return _fastest(request, _searches(request), top)[0]


def _leanest(request: PlanRequest, searches: list[TpPpSearch], top: int) -> list[Strategy]:
    """Returns the layout of each tp x pp that fits with the lowest memory, the lowest first."""
    found: list[Candidate] = []
    # the layouts that are split most are often lean
    for each in sorted(searches, key=lambda each: -each.tp * each.pp):
        within = request.usable_bytes
        if len(found) >= top:
            within = found[top - 1].bytes
        priced = each.leanest(within=within)
        if priced is not None:
            found.append(priced)
            found.sort(key=lambda priced: priced.bytes)
    return [Strategy(request, each.parallel) for each in found[:top]]


def one_that_fits(request: PlanRequest) -> Strategy | None:
    """Returns any layout that fits, much sooner than the best; None where none does or the request
    allows none."""
    # A lower bound: some device has the states of each parameter.
    framework = request.framework
    each_bytes = framework.weight_bytes + framework.gradient_bytes + framework.optimizer_bytes
    # which may have no gradients and no copy for computing beside the master
    if framework.is_parallel3d:
        each_bytes = master_bytes(request.precision) + request.training.state_bytes
    states_bytes = ROUNDED * each_bytes * total_parameters(request.shape)
    if states_bytes > request.gpus * request.usable_bytes:
        return None
    by_size = families(request)
    # One layout of each tp x pp first, the smallest microbatch without virtual stages, most often
    # the leanest.
    for part in (slice(1), slice(1, None)):
        for (tp, pp), own in by_size.items():
            each = TpPpSearch(request, tp, pp, own[part], blocks={})
            found = each.leanest(within=request.usable_bytes, is_any=True)
            if found is not None:
                return Strategy(request, found.parallel)
    return None


def compare(request: PlanRequest, wanted: Fixed) -> PlanResult | str:
    """Returns the cluster's best with `wanted` in the place of what is fixed, or the rule that
    `wanted` breaks."""
    try:
        other = replace(request, fixed=wanted)
        check_fixed(other)
        return search(other, top=1)
    except ConfigError as error:
        return str(error)


def sweep(request: PlanRequest, sizes: Iterable[int]) -> dict[int, Strategy | str]:
    """Returns the best layout on each number of devices, smallest first, or the reason why none
    fits. Raises ConfigError where the request allows no layout at any size, whatever the
    memory."""
    found: dict[int, Strategy | str] = {}
    refused: list[ConfigError] = []
    for gpus in sorted(set(sizes)):
        asked = replace(request, gpus=gpus)
        try:
            check_fixed(asked)
            best = fastest(asked, top=_TIED)
        except ConfigError as error:
            refused.append(error)
            found[gpus] = str(error)
            continue
        if best:
            found[gpus] = settled(best)[0]
        else:
            short_bytes = search(asked, top=1).rejected[0].short_bytes
            found[gpus] = (
                f"does not fit: {short_bytes / GIB:.1f} GiB are missing in the leanest layout"
            )
    if len(refused) == len(found):
        raise refused[-1]
    return found


def _searches(request: PlanRequest) -> list[TpPpSearch]:
    if request.gpus < 1:
        raise ConfigError(f"gpus = {request.gpus}: must be at least 1; try --gpus 1")
    blocks: BlockTimeCache = {}
    found = []
    for (tp, pp), own in families(request).items():
        each = TpPpSearch(request, tp, pp, own, blocks)
        if each.has_layouts:
            found.append(each)
    if not found:
        shape = request.shape
        fixed = vars(request.fixed).items()
        asked = ", ".join(f"{key} = {value}" for key, value in fixed if value is not None)
        raise ConfigError(
            f"no layout of {request.gpus} devices divides {shape.name} (layers {shape.layers}, "
            f"heads {shape.heads}, kv_heads {shape.kv_heads}) and a batch of "
            f"{request.global_batch_size} sequences ({asked or 'nothing fixed'}); try another "
            f"number of devices, or a batch that is a multiple of {request.gpus}"
        )
    return found


def _fastest(
    request: PlanRequest, searches: list[TpPpSearch], top: int
) -> tuple[list[Strategy], dict[TpPpSearch, Candidate]]:
    """Returns the best, priced exactly, and the best by the closed form of each tp x pp that can
    have one of them."""
    best: dict[TpPpSearch, Candidate] = {}
    orders: dict[TpPpSearch, Iterator[Candidate]] = {}
    most_ways = top + _SPARE_WAYS
    for each in sorted(searches, key=lambda each: each.least_s):
        times = sorted(priced.step_time_s for priced in best.values())
        within_s = inf
        if len(times) >= most_ways:
            within_s = times[most_ways - 1]
        orders[each] = each.fastest(within_s=within_s)
        priced = next(orders[each], None)
        if priced is not None:
            best[each] = priced
    is_fixed = request.fixed.tp is not None and request.fixed.pp is not None
    more = _FROM_EACH_WAY
    if is_fixed:
        more = max(_FINALISTS, 2 * top)
    ways = sorted(best, key=lambda each: (best[each].step_time_s, best[each].bytes))
    exact: list[tuple[Strategy, float]] = []
    for each in ways[:most_ways]:
        for finalist in (best[each], *islice(orders[each], more - 1)):
            exact.append((Strategy(request, finalist.parallel), finalist.bytes))
    # The fastest first, and layouts within a per mille of each other by memory, then by fewer tp
    # ranks.
    exact.sort(
        key=lambda found: (
            float(f"{found[0].cost.step_time_s:.3g}"),
            found[1],
            found[0].parallel.tp,
        )
    )
    first: dict[object, Strategy] = {}
    for one, _ in exact:
        way: object = (one.parallel.tp, one.parallel.pp)
        if is_fixed:
            way = one.parallel
        first.setdefault(way, one)
    return list(first.values())[:top], best

"""Layouts whose predicted speeds differ by less than the planner can tell: the safer and simpler
one comes first."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.planner.model.planned_run import other_axes
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.planner.search.tp_pp_search import Candidate

# Of pairs of published layouts predicted within 5% of each other, a quarter or more is in the wrong
# order (docs/explanation/planner.md).
TIE = 0.05
_WIDER = 1.25  # a range that is so many times as wide as the narrowest counts as wider


def slowest_tied_s(fastest_s: float) -> float:
    """Returns the seconds up to which a step ties with the fastest."""
    return fastest_s / (1 - TIE)


def put_in_order(request: PlanRequest, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns candidates in the order of time, but those that are tied with the fastest in the
    order of preference: the narrower range, fewer axes that divide the model (full recompute counts
    as one), no hybrid sharding, tp within a node, no recompute, fewer stages, sharding within a
    node, then time."""
    by_time = sorted(candidates, key=lambda each: each.step_time_s)
    if not by_time:
        return []
    most_s = slowest_tied_s(by_time[0].step_time_s)
    tied = [each for each in by_time if each.step_time_s <= most_s]
    widths = {each: Strategy(request, each.parallel).errors.throughput for each in tied}
    narrow = _WIDER * min(widths.values())
    node = request.cluster.gpus_per_node

    def preference(candidate: Candidate) -> tuple[float, ...]:
        parallel = candidate.parallel
        passes = 2 if parallel.recompute == "full" else 1
        means = (parallel.tp, parallel.pp, *other_axes(parallel), passes)
        return (
            widths[candidate] > narrow,
            len([size for size in means if size > 1]),
            1 < parallel.dp_replicate < parallel.dp,
            parallel.tp > node,
            parallel.recompute != "none",
            parallel.stages,
            parallel.tp * parallel.dp_shard > node,
            candidate.step_time_s,
        )

    return sorted(tied, key=preference) + by_time[len(tied) :]

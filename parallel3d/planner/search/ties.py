"""Ties: layouts whose predicted speeds differ by less than the planner's error. Safer and simpler
layouts are preferred."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.planner.search.request import Candidate, PlanRequest, Strategy

# At least a quarter of the pairs of published layouts within 5% of each other are predicted in the
# wrong order (docs/explanation/planner.md).
TIE = 0.05
_WIDER = 1.25  # A range of errors counts as wide from this many times the narrowest.


def slowest_tied_s(fastest_s: float) -> float:
    """Returns the largest step time that ties with the fastest."""
    return fastest_s / (1 - TIE)


def put_in_order(request: PlanRequest, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sorts candidates by step time, and those tied with the fastest by preference.

    In descending priority, it prefers a narrow error range, few axes besides data parallelism (full
    recompute counts as one), no hybrid sharding, tp within a node, no recompute, few stages,
    tp x cp x dp_shard within a node, and a short step time.
    """
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
        means = (parallel.tp, parallel.pp, parallel.cp, parallel.ep or 1, passes)
        return (
            widths[candidate] > narrow,
            len([size for size in means if size > 1]),
            1 < parallel.dp_replicate < parallel.dp,
            parallel.tp > node,
            parallel.recompute != "none",
            parallel.stages,
            parallel.tp * parallel.cp * parallel.dp_shard > node,
            candidate.step_time_s,
        )

    return sorted(tied, key=preference) + by_time[len(tied) :]

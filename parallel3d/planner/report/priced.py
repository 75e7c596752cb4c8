"""Memory and speed of all layouts that a search priced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.report.page import Plan, own_keys
from parallel3d.planner.search.request import Candidate
from parallel3d.planner.search.space import count_layouts
from parallel3d.planner.time.step import step_cost

_MOST = 2000  # Maximum number of layouts in a report.


def priced_tree(plan: Plan) -> dict[str, Any]:
    """Returns the priced layouts, without default keys, and the number of all layouts.

    The strategies come first, with their simulated speed. The speed of the others is from the
    closed form. If one of them does not fit, it needs at least the given memory.
    """
    request = plan.request
    found: dict[ParallelConfig, Candidate] = {}
    for best in plan.result.strategies:
        found[best.parallel] = Candidate(best.parallel, best.cost.step_time_s, best.memory.total)
    for nearest in plan.result.rejected:
        run = request.planned_run(nearest.parallel)
        seconds = step_cost(run, exact=False).step_time_s
        bytes_ = request.usable_bytes + nearest.short_bytes
        found[nearest.parallel] = Candidate(nearest.parallel, seconds, bytes_)
    for each in _front_first(plan.result.priced):
        found.setdefault(each.parallel, each)
    tokens = request.global_batch_size * request.seq_len / request.gpus
    layouts = [
        {
            "parallel": own_keys(replace(each.parallel, sharding=each.parallel.strategy)),
            "memory_gib": each.bytes / GIB,
            "tokens_per_s_per_gpu": tokens / each.step_time_s,
            "fits": each.bytes <= request.usable_bytes,
        }
        for each in islice(found.values(), _MOST)
    ]
    return {"count": len(found), "of": count_layouts(request), "layouts": layouts}


def _front_first(priced: Iterable[Candidate]) -> list[Candidate]:
    """Returns the layouts that no faster one beats in memory, then all of them, fastest first."""
    by_time = sorted(priced, key=attrgetter("step_time_s", "bytes"))
    front = []
    least = inf
    for each in by_time:
        if each.bytes < least:
            least = each.bytes
            front.append(each)
    return front + by_time

"""The simulated timeline of a layout's pipeline, short enough to be drawn."""

from __future__ import annotations

from typing import Any

from parallel3d.planner.search.request import Strategy
from parallel3d.planner.time.step import action_times
from parallel3d.schedules.build import build_schedule
from parallel3d.timeline.simulate import simulate
from parallel3d.timeline.spans import Timeline

_MOST_ACTIONS = 2500


def drawn_timeline(best: Strategy) -> Timeline | None:
    """Simulates the pipeline with as many microbatches as can be drawn, or returns None if there is
    no pipeline, or if even pp microbatches are too many."""
    layout = best.run.layout
    microbatches = layout.microbatches
    most = _MOST_ACTIONS // (2 * layout.stages)
    if microbatches > most:
        microbatches = most // layout.pp * layout.pp
    if layout.pp == 1 or microbatches == 0:
        return None
    schedule = build_schedule(
        best.run.schedule,
        pp=layout.pp,
        microbatches=microbatches,
        virtual_stages=layout.virtual_stages,
    )
    return simulate(schedule, action_times(best.run))


def timeline_tree(best: Strategy) -> dict[str, Any] | None:
    """Returns the figures of the timeline. `microbatches` may be fewer than those of a step."""
    timeline = drawn_timeline(best)
    if timeline is None:
        return None
    return {
        "schedule": timeline.name,
        "microbatches": 1 + max(span.action.microbatch for span in timeline.spans),
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
    }

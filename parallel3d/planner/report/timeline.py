"""The winner's pipeline in time, for a picture: its real schedule, simulated with its own stages' durations."""

from __future__ import annotations

from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.step import stage_times
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.timeline.simulate import ActionTimes, simulate
from parallel3d.timeline.spans import Timeline

_MOST_ACTIONS = 8000  # some 200 KB of picture
_DEPTHS = (4, 2, 1)  # pipelines' depths of microbatches that are drawn, whichever is not too many


def planned_timeline(run: PlannedRun) -> tuple[Timeline, int] | None:
    """A step's timeline and how many of its microbatches it has: all, or so few that a page can show them. None where
    there is nothing to draw: no pipeline, one too large, another program's own schedule, or ranks that share
    processors, as a calibrated host's do."""
    layout, shared = run.layout, run.cluster.measured is not None
    if layout.pp == 1 or layout.schedule not in SCHEDULES or shared:
        return None
    most = _MOST_ACTIONS // (3 * layout.stages)
    counts = [layout.microbatches, *(depth * layout.pp for depth in _DEPTHS)]
    drawn = next((count for count in counts if count <= min(most, layout.microbatches)), None)
    if drawn is None:
        return None
    schedule = build_schedule(
        layout.schedule,
        pp=layout.pp,
        microbatches=drawn,
        virtual_stages=layout.virtual_stages,
        check=False,
    )
    times, send_s = stage_times(run)
    return simulate(schedule, ActionTimes(stages=tuple(times), transfers=(send_s,) * (len(times) - 1))), drawn

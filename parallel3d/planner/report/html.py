"""A plan as one HTML file to keep or to send: the report and its figures, without scripts and
without the network. It is well-formed XML, too: the tests read it as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.report.page import Plan, page
from parallel3d.planner.report.svg import memory_figure, time_figure
from parallel3d.planner.report.text import telling_ranks
from parallel3d.planner.search.question import Strategy
from parallel3d.planner.time.step import stage_times
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.timeline.draw import draw_svg
from parallel3d.timeline.simulate import ActionTimes, simulate

_MOST_RANKS = 32
_MOST_STAGES = 24
_DEPTH = 2  # microbatches that are drawn, in depths of the pipeline
_STYLE = Path(__file__).with_name("plan.css")


def html_page(plan: Plan) -> str:
    """Returns the whole file."""
    question = plan.question
    title = f"{question.shape.name} on {question.gpus} x {question.cluster.device.name}"
    figures = [] if plan.best is None else _figures(plan.best)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"/><title>{escape(title)}: parallel3d-plan</title>',
        f"<style>{_STYLE.read_text()}</style></head>",
        f"<body><h1>{escape(title)}</h1><pre>{escape(page(plan))}</pre>",
        *figures,
        "</body></html>\n",
    ]
    return "\n".join(lines)


def _figures(best: Strategy) -> Iterator[str]:
    question = best.question
    ranks = memory_by_rank(best.run)
    limits = question.usable_bytes, question.cluster.device.memory_bytes
    yield _figure("Memory", memory_figure(telling_ranks(ranks, _MOST_RANKS), *limits))
    if (pipeline := _pipeline_figure(best.run)) is not None:
        yield _figure(f"The pipeline, at most {_DEPTH} x pp microbatches", pipeline)
    yield _figure("Where the time goes", time_figure(best.cost.parts))


def _pipeline_figure(run: PlannedRun) -> str | None:
    """Returns the picture of a step with few microbatches; None without a pipeline, for one that is
    too large, for another program's schedule, and for ranks that share processors."""
    layout = run.layout
    is_shared = run.cluster.measured is not None
    is_known = layout.schedule in SCHEDULES and layout.stages <= _MOST_STAGES
    if layout.pp == 1 or is_shared or not is_known:
        return None
    schedule = build_schedule(
        layout.schedule,
        pp=layout.pp,
        microbatches=min(layout.microbatches, _DEPTH * layout.pp),
        virtual_stages=layout.virtual_stages,
        check=False,
    )
    times, send_s = stage_times(run)
    transfers = (send_s,) * (len(times) - 1)
    return draw_svg(simulate(schedule, ActionTimes(stages=tuple(times), transfers=transfers)))


def _figure(title: str, svg: str) -> str:
    return f"<h2>{escape(title)}</h2><figure>{svg}</figure>"

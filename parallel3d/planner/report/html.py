"""A plan as one HTML file to keep or to send: figures, tables and assumptions, without scripts and without the network.

It says what the page says, in the same words (`page.advice`). It is well-formed XML, too: the tests read it as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.report.json import hardware_tree, memory_tree
from parallel3d.planner.report.page import Plan, advice, header, missing_memory
from parallel3d.planner.report.svg import memory_figure, scatter_figure, time_figure
from parallel3d.planner.report.text import layout_text, money, telling_ranks
from parallel3d.planner.search.question import Strategy
from parallel3d.planner.time.step import stage_times
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.timeline.simulate import ActionTimes, simulate
from parallel3d.timeline.spans import Timeline
from parallel3d.timeline.svg import draw_svg

_MOST_ROWS = 20
_MOST_RANKS = 32
_MOST_ACTIONS = 8000  # some 200 KB of picture
_DEPTHS = (4, 2, 1)  # pipelines' depths of microbatches that are drawn, whichever is not too many
_STYLE = Path(__file__).with_name("plan.css")


def html_page(plan: Plan) -> str:
    """Returns the whole file."""
    question, best = plan.question, plan.best
    title = f"{question.shape.name} on {question.gpus} x {question.cluster.device.name}"
    return "\n".join([
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"/><title>{escape(title)}: parallel3d-plan</title>',
        '<meta name="viewport" content="width=device-width"/>',
        f"<style>{_STYLE.read_text()}</style></head>",
        "<body>",
        _tag("h1", title),
        _tag("pre", "\n".join(header(question))),
        _tag("h2", "What to use" if best is not None else f"Nothing fits: {missing_memory(plan)}"),
        _list(advice(plan)),
        *([] if best is None else _figures(plan, best)),
        *_tables(plan),
        "</body></html>\n",
    ])  # fmt: skip


def _figures(plan: Plan, best: Strategy) -> Iterator[str]:
    question, run = best.question, best.run
    every = memory_by_rank(run)
    ranks = telling_ranks(every, _MOST_RANKS)
    yield _tag("h2", "Memory")
    few = f" Of {len(every)} pipeline ranks those that may differ most." if len(ranks) < len(every) else ""
    figure = memory_figure(ranks, question.usable_bytes, question.cluster.device.memory_bytes)
    yield _figure(figure, f"GiB on each device of a pipeline rank at its fullest.{few}")
    kinds = [(each.rank, memory_tree(each).items()) for each in ranks]
    yield _folded("as a table", [{"rank": rank, **{kind: f"{gib:.2f}" for kind, gib in tree}} for rank, tree in kinds])
    if (planned := _planned_timeline(run)) is not None:
        timeline, drawn = planned
        whole = run.layout.microbatches
        yield _tag("h2", "The pipeline")
        share = best.cost.parts.pp_bubble / best.cost.step_time_s
        few = f"Drawn with {drawn} of a step's {whole} microbatches, so with more idle time. " if drawn < whole else ""
        caption = f"{few}Over the whole step the bubble takes {share:.1%} of the time. Seconds."
        yield _figure(draw_svg(timeline, detailed=len(timeline.spans) <= 300), caption, kind="")
    yield _tag("h2", "Where the time goes")
    yield _figure(time_figure(best.cost.parts), "Seconds of a step on the busiest rank, each cause after the last.")
    yield _tag("h2", "Memory against speed")
    told = plan.answer.strategies[:_MOST_ROWS]
    caption = "The strategies below by their numbers; on the line nothing is both leaner and faster."
    yield _figure(scatter_figure(told, question.usable_bytes), caption)


def _tables(plan: Plan) -> Iterator[str]:
    question, answer = plan.question, plan.answer
    rows: list[Mapping[str, object]] = []
    for number, each in enumerate(answer.strategies[:_MOST_ROWS], 1):
        total, length = each.memory.total, plan.length(each)
        rows.append({
            "": number,
            "GPUs": each.parallel.world_size,
            "tp": each.parallel.tp,
            "pp": each.parallel.pp,
            "GiB": f"{total / GIB:.1f}",
            "full": f"{total / question.usable_bytes:.0%}",
            "tokens/s/GPU": f"{each.cost.tokens_per_s_per_gpu:,.0f}",
            "MFU": f"{each.cost.mfu:.1%}",
            "step s": f"{each.cost.step_time_s:.3g}",
            **({"days": f"{length.days:,.3g}", "price": money(length.price)} if length is not None else {}),
            "layout": layout_text(each.parallel),
        })  # fmt: skip
    if rows:
        yield _tag("h2", "Strategies")
        yield _table(rows, best=True)
    if answer.rejected:
        yield _tag("h2", "Rejected")
        yield _table([
            {
                "GiB short": f"{each.short_bytes / GIB:.1f}",
                "the leanest layout of a tp x pp": f"{layout_text(each.parallel)}: {each.reason}",
            }
            for each in answer.rejected[:_MOST_ROWS]
        ])  # fmt: skip
    if answer.left_out:
        yield _folded("every other tp x pp", [asdict(each) for each in answer.left_out])
    yield _tag("h2", "Assumptions")
    program = f"{question.program.name}, {question.precision}; schedules that compete: {', '.join(question.schedules)}"
    memory = f"of a device {question.memory_fraction:.0%} are used, {question.usable_bytes / GIB:.1f} GiB"
    yield _list([("engine", program), ("memory", memory)])
    figures = rounded(hardware_tree(question.cluster)).items()
    yield _folded("the hardware's figures", [{"figure": name, "value": value} for name, value in figures])
    counts = "MFU counts model FLOPs over the dense peak, causal attention whole, recomputation not."
    yield _tag("p", f"{counts} docs/planner.md says how each figure comes about.", "quiet")


def _planned_timeline(run: PlannedRun) -> tuple[Timeline, int] | None:
    """A step's timeline and how many of its microbatches it has: all, or so few that a page can show them. None where
    there is nothing to draw: no pipeline, one too large, another program's schedule, or ranks that share processors."""
    layout, shared = run.layout, run.cluster.measured is not None
    if layout.pp == 1 or layout.schedule not in SCHEDULES or shared:
        return None
    most = _MOST_ACTIONS // (3 * layout.stages)
    counts = [layout.microbatches, *(depth * layout.pp for depth in _DEPTHS)]
    drawn = next((count for count in counts if count <= min(most, layout.microbatches)), None)
    if drawn is None:
        return None
    virtual = layout.virtual_stages
    schedule = build_schedule(layout.schedule, pp=layout.pp, microbatches=drawn, virtual_stages=virtual, check=False)
    times, send_s = stage_times(run)
    return simulate(schedule, ActionTimes(stages=tuple(times), transfers=(send_s,) * (len(times) - 1))), drawn


def _figure(svg: str, caption: str, kind: str = ' class="plain"') -> str:
    return f"<figure{kind}>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items) + "</dl>"


def _table(rows: Sequence[Mapping[str, object]], *, best: bool = False) -> str:
    """Returns rows of cells by the heads of their columns; with `best` the first is marked."""
    lines = ["<tr>" + "".join(f"<th>{escape(head)}</th>" for head in row) + "</tr>" for row in rows[:1]]
    for number, row in enumerate(rows):
        mark = ' class="best"' if best and number == 0 else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row.values()) + "</tr>")
    return "\n".join(["<table>", *lines, "</table>"])


def _folded(summary: str, rows: Sequence[Mapping[str, object]]) -> str:
    return f"<details>{_tag('summary', summary)}{_table(rows)}</details>"


def _tag(name: str, text: str, kind: str = "") -> str:
    start = f'{name} class="{kind}"' if kind else name
    return f"<{start}>{escape(text)}</{name}>"

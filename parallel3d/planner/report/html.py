"""A plan as one HTML file to keep or to send: figures, tables and assumptions, without scripts and without the network.

It says what the page says, in the same words (`page.advice`). It is well-formed XML, too: the tests read it as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain

from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.report.json import hardware_tree, memory_tree
from parallel3d.planner.report.page import Plan, advice, header, missing_memory
from parallel3d.planner.report.svg import memory_figure, scatter_figure, time_figure
from parallel3d.planner.report.text import MEMORY_KINDS, layout_text, money, telling_ranks
from parallel3d.planner.report.timeline import planned_timeline
from parallel3d.planner.search.question import Strategy
from parallel3d.timeline.svg import draw_svg

_MOST_ROWS = 20
_MOST_RANKS = 32
_STYLE = """\
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --quiet: #666; --rule: #ccc; --limit: #c00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --quiet: #aaa; --rule: #444; --limit: #ff6b5e }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid var(--rule) }
pre, code { font: 13px ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: 13px; width: 100% }
th, td { text-align: right; padding: 2px 6px; border-bottom: 1px solid var(--rule) }
th:last-child, td:last-child { text-align: left } tr.best { font-weight: bold }
figure { margin: 1rem 0; overflow-x: auto } figcaption, .quiet { color: var(--quiet); font-size: 13px }
svg { max-width: 100%; height: auto } figure.plain svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 4 3; fill: none }
.axis { stroke: var(--quiet); fill: none } .front { stroke: #d55e00; stroke-width: 2; fill: none }
dt { float: left; clear: left; width: 6rem; color: var(--quiet) } dd { margin: 0 0 .4rem 7rem }
@media print { body { margin: 0; max-width: none } figure, tr { break-inside: avoid } }
"""


def html_page(plan: Plan) -> str:
    """Returns the whole file."""
    question, best = plan.question, plan.best
    title = f"{question.shape.name} on {question.gpus} x {question.cluster.device.name}"
    body = [_tag("h1", title), "<pre>" + escape("\n".join(header(question))) + "</pre>"]
    body.append(_tag("h2", "What to use" if best is not None else f"Nothing fits: {missing_memory(plan)}"))
    body.append(_list(advice(plan)))
    body += [] if best is None else _figures(plan, best)
    body += [_tag("h2", "Strategies"), *_strategies(plan), *_left_behind(plan)]
    body += [_tag("h2", "Assumptions"), *_assumptions(plan)]
    return "\n".join([
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"/><title>{escape(title)}: parallel3d-plan</title>',
        '<meta name="viewport" content="width=device-width"/>',
        f"<style>{_STYLE}</style></head>",
        "<body>",
        *body,
        "</body></html>\n",
    ])  # fmt: skip


def _figures(plan: Plan, best: Strategy) -> Iterator[str]:
    question, run, parallel = best.question, best.run, best.parallel
    every = memory_by_rank(run)
    ranks = telling_ranks(every, _MOST_RANKS)
    yield _tag("h2", "Memory")
    few = f" Of {len(every)} pipeline ranks those that may differ most." if len(ranks) < len(every) else ""
    figure = memory_figure(ranks, question.usable_bytes, question.cluster.device.memory_bytes)
    yield _figure(figure, f"GiB on each device of a pipeline rank at its fullest.{few}")
    rows = ([each.rank, *(f"{gib:.2f}" for gib in memory_tree(each).values())] for each in ranks)
    table = _table(["rank", "total", *MEMORY_KINDS], rows)
    yield f"<details><summary>as a table</summary>{table}</details>"
    if (planned := planned_timeline(run)) is not None:
        timeline, drawn = planned
        whole = question.global_batch_size // (parallel.dp * parallel.microbatch_size)
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


def _strategies(plan: Plan) -> Iterator[str]:
    if not plan.answer.strategies:
        return
    head = ["", "GPUs", "tp", "pp", "GiB", "full", "tokens/s/GPU", "MFU", "step s"]
    head += ["days", "price"] if plan.tokens is not None else []
    usable = plan.question.usable_bytes
    rows: list[list[object]] = []
    for number, each in enumerate(plan.answer.strategies[:_MOST_ROWS], 1):
        total, cost = each.memory.total, each.cost
        row: list[object] = [number, each.parallel.world_size, each.parallel.tp, each.parallel.pp]
        row += [f"{total / GIB:.1f}", f"{total / usable:.0%}", f"{cost.tokens_per_s_per_gpu:,.0f}", f"{cost.mfu:.1%}"]
        row.append(f"{cost.step_time_s:.3g}")
        length = plan.length(each)
        row += [] if length is None else [f"{length.days:,.3g}", money(length.price)]
        rows.append([*row, layout_text(each.parallel)])
    yield _table([*head, "layout"], rows, best=True)


def _left_behind(plan: Plan) -> Iterator[str]:
    if plan.answer.rejected:
        yield _tag("h2", "Rejected")
        rejected = [
            (f"{each.short_bytes / GIB:.1f}", f"{layout_text(each.parallel)}: {each.reason}")
            for each in plan.answer.rejected[:_MOST_ROWS]
        ]
        yield _table(["GiB short", "the leanest layout of a tp x pp"], rejected)
    if plan.answer.left_out:
        left_out = [(each.tp, each.pp, each.reason) for each in plan.answer.left_out]
        yield "<details><summary>every other tp x pp</summary>" + _table(["tp", "pp", "why"], left_out) + "</details>"


def _assumptions(plan: Plan) -> Iterator[str]:
    question = plan.question
    program = f"{question.program.name}, {question.precision}; schedules that compete: {', '.join(question.schedules)}"
    figures = rounded(hardware_tree(question.cluster))
    memory = f"of a device {question.memory_fraction:.0%} are used, {question.usable_bytes / GIB:.1f} GiB"
    yield _list([("engine", program), ("memory", memory)])
    yield "<details><summary>the hardware's figures</summary>" + _table(["", ""], figures.items()) + "</details>"
    yield _tag(
        "p",
        "MFU counts model FLOPs over the dense peak, causal attention whole, recomputation not. docs/planner.md "
        "says how each figure comes about.",
        "quiet",
    )


def _figure(svg: str, caption: str, kind: str = ' class="plain"') -> str:
    return f"<figure{kind}>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items) + "</dl>"


def _table(head: Sequence[str], rows: Iterable[Iterable[object]], *, best: bool = False) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for number, row in enumerate(rows):
        mark = ' class="best"' if best and number == 0 else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>")
    return "\n".join(chain(["<table>"], lines, ["</table>"]))


def _tag(name: str, text: str, kind: str = "") -> str:
    start = f'{name} class="{kind}"' if kind else name
    return f"<{start}>{escape(text)}</{name}>"

"""The report of runs as an HTML page. run.js draws its charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from parallel3d.timeline.draw import SVG_STYLE, draw_svg
from parallel3d.timeline.trace import slowest_and_simulated
from parallel3d.tools.report.charts import Tree
from parallel3d.tools.report.page import Number, page, table
from parallel3d.tools.report.text import (
    Figure,
    figures,
    problems,
    quantity,
    steps_text,
)
from parallel3d.watch.step_clock import CAUSES

_MOST_ACTIONS = 6000  # Of the timelines, which take 300 bytes each.
_PAIR = ("key", "value")
_COLORS = {
    "done": "good",
    "failed": "bad",
}


def report_page(tree: Tree) -> str:
    """Returns a report as HTML."""
    title = ", ".join(run["name"] for run in tree["runs"])
    body = "\n".join([f"<h1>{escape(title)}</h1>", *_body(tree)])
    script = Path(__file__).with_name("run.js").read_text(encoding="utf-8")
    return page(f"{title}: report", body, tree, scripts=[script], styles=[SVG_STYLE])


def _body(tree: Tree) -> Iterator[str]:
    runs = tree["runs"]
    for run in runs:
        yield _card("".join(_header(run)))
    if tree["differences"]:
        rows = [[key, *values] for key, values in tree["differences"].items()]
        head = ["key", *(run["name"] for run in runs)]
        yield _card(table("Recipe keys that differ", head, rows))
    yield '<h2>Curves</h2><div class="tools" id="marks"></div><div class="cards" id="curves"></div>'
    yield '<h2>Time and memory</h2><div class="cards" id="parts"></div>'
    for run in runs:
        columns = 4 if run["predicted"] else 2
        rows = [_compared(figure)[:columns] for figure in figures(run)]
        head = ["figure", "measured", "predicted", "error"][:columns]
        note = f'<p class="faint">{escape(run["note"])}</p>'
        yield _card(table(run["name"], head, rows) + note)
    for run in runs:
        yield from _pipeline(run)
    yield "<h2>Events and provenance</h2>"
    for run in runs:
        events = [(Number(each["step"], str(each["step"])), each["text"]) for each in run["events"]]
        shut = _details(f"{run['name']}: events", ["step", "event"], events)
        yield shut.replace("<details>", "<details open>", 1)
        for start in run["starts"]:
            title = f"{run['name']}: start at step {start['step']}"
            yield _details(title, _PAIR, [*start["facts"].items()])
        yield _details(f"{run['name']}: recipe", _PAIR, [*run["recipe"].items()])


def _header(run: Tree) -> Iterator[str]:
    status = f'<span class="{_COLORS.get(run["status"], "warn")}">{escape(run["status"])}</span>'
    yield f"<h2>{status}, {escape(steps_text(run))}, {problems(run)}</h2>"
    yield f"<p>{escape(run['folder'])}</p>"
    if run["reason"]:
        yield f'<p class="bad">{escape(run["reason"])}</p>'
    if run["resume"]:
        yield f"<p>Resume with</p><pre>{escape(run['resume'])}</pre>"
    if run["damaged_lines"]:
        yield f"<p>{run['damaged_lines']} damaged lines of metrics.jsonl are left out.</p>"
    yield '<dl class="facts">'
    for each in figures(run):
        if each.label in CAUSES:
            continue
        value = quantity(each.measured, each.unit)
        yield f"<div><dt>{escape(each.label)}</dt><dd>{value}</dd></div>"
    yield "</dl>"


def _card(html: str) -> str:
    return f'<div class="card wide">{html}</div>'


def _details(title: str, head: Sequence[str], rows: Sequence[Sequence[str | Number]]) -> str:
    inner = _card(table(title, head, rows, filters=True))
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _compared(figure: Figure) -> list[str | Number]:
    error = Number(0.0, "-")
    if figure.measured and figure.predicted:
        ratio = figure.predicted / figure.measured - 1
        error = Number(ratio, f"{ratio:+.1%}")
    pair = (figure.measured, figure.predicted)
    numbers = [Number(value or 0.0, quantity(value, figure.unit)) for value in pair]
    return [figure.label, *numbers, error]


def _pipeline(run: Tree) -> Iterator[str]:
    """Yields the timeline of the slowest pipeline and its simulation, on one time scale."""
    if run["timelines"] is None:
        return
    both = slowest_and_simulated(Path(run["timelines"]["file"]))
    if sum(len(timeline.spans) for timeline in both) > _MOST_ACTIONS:
        yield "<p>The timeline is too long to draw here. Open its file in ui.perfetto.dev.</p>"
        return
    longest_s = max(timeline.makespan_s for timeline in both)
    yield f"<h2>Pipeline of {escape(run['name'])}</h2>"
    for kind, timeline in zip(("Slowest, measured", "Simulated"), both, strict=True):
        drawn = draw_svg(timeline, longest_s=longest_s)
        drawn = drawn.replace(f"<style>{SVG_STYLE}</style>", "")  # The page has the style.
        bubble = f"{quantity(timeline.makespan_s, 's')}, bubble {timeline.bubble_fraction:.1%}"
        yield f'<figure class="stack"><figcaption>{kind}: {bubble}</figcaption>{drawn}</figure>'

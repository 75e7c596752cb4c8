"""Writes a plan as HTML, with the numbers of --json. `plan.js` draws the charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.report.page import (
    MORE_AXES,
    Plan,
    all_notes,
    header,
    layout_text,
    next_commands,
    three_digits,
)
from parallel3d.timeline.draw import SVG_STYLE, draw_svg
from parallel3d.tools.cli_output import check_free
from parallel3d.tools.plan.accuracy import how_sure
from parallel3d.tools.plan.timeline import drawn_timeline
from parallel3d.tools.report.page import Number, is_page, page, table

_FOLDER = Path(__file__).parent
_FIGURES = {
    "tokens_per_s_per_gpu": "tokens/s per GPU",
    "mfu": "MFU",
    "step_time_s": "seconds per step",
    "memory_gib": "GiB of memory",
    "days": "days",
    "gpu_hours": "GPU-hours",
    "price": "US dollars",
}
_AXES = ("tp", "pp", "virtual_stages", *MORE_AXES, "dp_shard", "dp_replicate", "microbatch_size")


def check_page(path: Path | None) -> None:
    """Raises ConfigError if the path of --html cannot be created and is not an HTML report."""
    if path is None or is_page(path):
        return
    if path.exists():
        raise ConfigError(f"--html {path}: exists already and is not a report; try another path")
    check_free("--html", path)


def plan_page(plan: Plan, tree: Mapping[str, Any]) -> str:
    """Returns the HTML of a plan. `tree` is the object of --json."""
    q = plan.request
    title = f"{q.shape.name} on {q.gpus} x {q.cluster.device.name}"
    body = "\n".join([f"<h1>{escape(title)}</h1>", *_body(plan, tree)])
    style = (_FOLDER / "plan.css").read_text()
    script = (_FOLDER / "plan.js").read_text()
    return page(f"Plan: {title}", body, tree, scripts=[script], styles=[SVG_STYLE, style])


def _body(plan: Plan, tree: Mapping[str, Any]) -> Iterator[str]:
    yield _text("Request", header(plan.request))
    best = plan.best
    if best is None:
        yield '<p class="bad">No layout fits.</p>'
        yield _text("One of these changes would make one fit", plan.remedies)
    else:
        yield _text("Recommended layout", [layout_text(best.parallel)])
        yield f'<dl class="facts">{"".join(_facts(tree["strategies"][0]))}</dl>'
        yield '<div class="cards" id="causes"></div>'
    priced = tree["priced"]
    yield "<h2>Memory and speed of all priced layouts</h2>"
    yield f"<p>The search priced {priced['count']:,} of {priced['of']:,} layouts and excluded the"
    yield "others by bounds. Speeds of layouts that are not in the table of strategies are from the"
    yield "closed form. A layout that does not fit needs at least the memory shown.</p>"
    yield '<div id="priced"></div>'
    axes = _axes([*tree["strategies"], *tree["rejected"]])
    if best is not None:
        rows = []
        for each in tree["strategies"]:
            figures = [each["memory_gib"]["total"], *map(each.get, [*_FIGURES][:3])]
            choice = each["parallel"]
            recompute = f"{choice['recompute']} {choice['recompute_every'] or ''}"
            rows.append(_row(axes, choice, recompute, figures))
        head = (*axes, "recompute", "GiB", "tokens/s per GPU", "MFU", "step s")
        yield "<h2>Strategies</h2>"
        yield table("The best layouts", head, rows, filters=True)
        yield '<h2>Mesh</h2><div id="mesh"></div>'
        timeline = drawn_timeline(best)
        if timeline is not None:
            found = tree["timeline"]
            count = f"{found['microbatches']} of {best.run.layout.microbatches} microbatches"
            took = f"{three_digits(found['makespan_s'])} s, bubble {found['bubble_fraction']:.1%}"
            yield f"<h2>Pipeline</h2><figure><figcaption>{timeline.name}, {count}: {took}"
            yield f"</figcaption>{draw_svg(timeline)}</figure>"
    if tree["rejected"]:
        rows = []
        for each in tree["rejected"]:
            rows.append(_row(axes, each["parallel"], each["reason"], [each["short_gib"]]))
        yield "<h2>Rejected</h2>"
        head = (*axes, "reason", "missing GiB")
        yield table("The nearest to fitting of each tp and pp", head, rows, filters=True)
    yield _text("Notes", [*all_notes(plan), how_sure(plan.request)])
    yield _text("Next", next_commands(plan))


def _text(title: str, lines: Iterable[str]) -> str:
    """Returns a heading with lines of text below it, or nothing without lines."""
    text = escape("\n".join(lines))
    return f"<h2>{title}</h2><pre>{text}</pre>" if text else ""


def _facts(best: Mapping[str, Any]) -> Iterator[str]:
    """Yields the main figures of the best layout with their ranges."""
    figures = {**best, **(best["run"] or {}), "memory_gib": best["memory_gib"]["total"]}
    for key, name in _FIGURES.items():
        if figures.get(key) is None:
            continue
        around = best["ranges"][key]
        yield f"<div><dt>{name}</dt><dd>{three_digits(figures[key])}</dd>"
        limits = f"{three_digits(around['low'])} to {three_digits(around['high'])}"
        yield f'<dd class="faint">{limits}</dd></div>'


def _axes(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the axes that some layout uses."""
    used = []
    for axis in _AXES:
        if any((each["parallel"][axis] or 1) > 1 for each in found):
            used.append(axis)
    return used


def _row(
    axes: Iterable[str], parallel: Mapping[str, Any], text: str, figures: Iterable[float]
) -> list[str | Number]:
    sizes = [Number(parallel[axis] or 1, str(parallel[axis] or 1)) for axis in axes]
    return [*sizes, text, *(Number(figure, three_digits(figure)) for figure in figures)]

"""Draws timelines as plain text, SVG or Chrome trace."""

from __future__ import annotations

import json
from typing import Any
from xml.sax.saxutils import escape

from parallel3d.schedules.schedule import Kind
from parallel3d.timeline.spans import Timeline

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}
# The second, fourth, ... stage of a rank has the second color.
_COLORS = {
    Kind.FORWARD: ("#4c78c8", "#8fb0e8"),
    Kind.BACKWARD: ("#3f9a5f", "#86c79b"),
    Kind.INPUT: ("#2f9aa0", "#7fcacd"),
    Kind.WEIGHT: ("#d09a35", "#e8c583"),
}
_IDLE = "."
_NARROWEST = 20  # Minimum number of columns for the bars.
_ROW, _BAR, _LEFT, _TITLE, _CHARACTER = 24, 20, 64, 28, 6.2  # Pixels.
SVG_STYLE = """\
text { font: 10px ui-monospace, monospace; fill: #1a1a1a } .t { font-size: 13px }
.idle { fill: #ececec } .bar text { fill: #101010; text-anchor: middle }
@media (prefers-color-scheme: dark) { svg > text { fill: #e8e8e8 } .idle { fill: #333333 } }
"""


def draw_text(timeline: Timeline, *, width: int = 120) -> str:
    """Draws a timeline as plain ASCII text with one line per rank, of at most `width` columns.

    Bars get at least 20 columns; headline and legend ignore `width`. If there are enough columns,
    the shortest action gets a whole number of them, at most what the longest name needs. A bar
    that is too narrow for its name shows the letter of its kind. The second, fourth, ... stage of a
    rank is in lower case.
    """
    prefix = len(f"rank {timeline.ranks - 1} |")
    room = max(_NARROWEST, width - prefix)
    spans = timeline.spans
    shortest_s = min((span.duration_s for span in spans), default=0.0)
    longest_name = max((len(str(span.action)) - 1 for span in spans), default=0)
    columns_each = int(room * shortest_s / (timeline.makespan_s or 1.0))
    column_s = timeline.makespan_s / room or 1.0
    if columns_each > 0:
        column_s = shortest_s / min(columns_each, longest_name + 1)
    second = _second_stages(timeline)
    lines = [_headline(timeline)]
    for rank, row in enumerate(timeline.by_rank):
        line = [_IDLE] * round(timeline.makespan_s / column_s)
        for span in row:
            start = round((span.start_s - timeline.start_s) / column_s)
            length = round((span.end_s - timeline.start_s) / column_s) - start
            name = f"{span.action.kind}{span.action.microbatch}"
            if len(name) >= length:
                name = span.action.kind.value
            if span.action.stage in second:
                name = name.lower()
            # Keep a gap before the next bar.
            bar = name.ljust(max(1, length - 1), "-").ljust(length)
            line[start : start + length] = bar[:length]
        label = f"rank {rank}".ljust(prefix - 1)
        lines.append(f"{label}|{''.join(line)}".rstrip())
    legend = [f"{kind} {_WORDS[kind]}" for kind in _kinds(timeline)]
    lines.append(f"{', '.join(legend)}, {_IDLE} idle (F0: forward, microbatch 0)")
    return "\n".join(lines) + "\n"


def draw_svg(timeline: Timeline, *, width: int = 1200, longest_s: float | None = None) -> str:
    """Draws a timeline as a self-contained SVG of `width` pixels, with light and dark colors.

    Each bar has its times as a tooltip, and its name if it fits. To draw several timelines on one
    scale, give the longest makespan of them as `longest_s`.
    """
    room = width - _LEFT - 8
    scale = room / (longest_s or timeline.makespan_s or 1.0)  # pixels per second
    title = escape(_headline(timeline))
    second = _second_stages(timeline)
    parts = [f'<text class="t" x="4" y="18">{title}</text>']
    idle = f'class="idle" x="{_LEFT}" width="{room}" height="{_BAR}"'
    for rank, row in enumerate(timeline.by_rank):
        y = _TITLE + rank * _ROW
        parts.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        parts.append(f'<rect {idle} y="{y}"/>')
        for span in row:
            action = span.action
            start_s = span.start_s - timeline.start_s
            x = _LEFT + start_s * scale
            wide = span.duration_s * scale
            place = f'x="{x:.2f}" y="{y}" width="{max(wide - 0.5, 0.2):.2f}" height="{_BAR}"'
            color = _COLORS[action.kind][action.stage in second]
            name = f"{action.kind}{action.microbatch}"
            parts.append(f'<g class="bar"><rect {place} fill="{color}"/>')
            parts.append(
                f"<title>{action} on rank {rank}: {start_s:.6g} to "
                f"{start_s + span.duration_s:.6g}</title>"
            )
            if len(name) * _CHARACTER + 2 <= wide:
                parts.append(f'<text x="{x + wide / 2:.2f}" y="{y + 14}">{name}</text>')
            parts.append("</g>")
    x = _LEFT
    bottom = _TITLE + timeline.ranks * _ROW + 8
    for kind in _kinds(timeline):
        fill = _COLORS[kind][0]
        parts.append(f'<rect x="{x}" y="{bottom}" width="14" height="14" fill="{fill}"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom + 11}">{kind} {escape(_WORDS[kind])}</text>')
        x += 40 + round(_CHARACTER * (len(_WORDS[kind]) + 2))
    size = f'width="{width}" height="{bottom + 24}" viewBox="0 0 {width} {bottom + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
    return "\n".join([head, f"<style>{SVG_STYLE}</style>", *parts, "</svg>\n"])


def draw_trace(*timelines: Timeline) -> str:
    """Draws timelines as a Chrome trace for https://ui.perfetto.dev or chrome://tracing.

    Each timeline is a process that begins at 0 and each rank a thread, so that you can compare a
    measured timeline with a simulated one. One unit of simulated time is shown as a second.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        names = [("process_name", 0, _headline(timeline))]
        names += [("thread_name", rank, f"rank {rank}") for rank in range(timeline.ranks)]
        for what, thread, name in names:
            args = {"name": name}
            events.append({"ph": "M", "pid": process, "tid": thread, "name": what, "args": args})
        for span in timeline.spans:
            event = {
                "ph": "X",
                "pid": process,
                "tid": span.rank,
                "name": str(span.action),
                "cat": _WORDS[span.action.kind],
                "ts": (span.start_s - timeline.start_s) * 1e6,  # microseconds, like `dur`
                "dur": span.duration_s * 1e6,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            events.append(event)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _second_stages(timeline: Timeline) -> set[int]:
    """Returns the stages that are the second, fourth, ... of their rank."""
    found: set[int] = set()
    for row in timeline.by_rank:
        found.update(sorted({span.action.stage for span in row})[1::2])
    return found


def _kinds(timeline: Timeline) -> list[Kind]:
    """Returns the kinds of actions that occur, in the order of the legend."""
    there = {span.action.kind for span in timeline.spans}
    return [kind for kind in Kind if kind in there]


def _headline(timeline: Timeline) -> str:
    bubble = f"bubble {100 * timeline.bubble_fraction:.1f}%"
    return f"{timeline.name}: makespan {timeline.makespan_s:.6g}, {bubble}"

"""A timeline as SVG: self-contained, each bar with its times as a tooltip, light or dark as its
reader is."""

from __future__ import annotations

from xml.sax.saxutils import escape

from parallel3d.timeline.draw import LOOKS, chunks, headline, kinds
from parallel3d.timeline.spans import Span, Timeline

_ROW, _BAR, _LEFT, _TITLE, _CHARACTER = 24, 20, 64, 28, 6.2  # pixels
_STYLE = """\
text { font: 10px ui-monospace, monospace; fill: #1a1a1a } .t { font-size: 13px }
.idle { fill: #ececec } .bar text { fill: #101010; text-anchor: middle }
@media (prefers-color-scheme: dark) { svg > text { fill: #e8e8e8 } .idle { fill: #333333 } }
"""


def draw_svg(timeline: Timeline, *, width: int = 1200) -> str:
    """Draws a picture of `width` pixels."""
    scale = (width - _LEFT - 8) / (timeline.makespan_s or 1.0)  # pixels a second
    title = escape(headline(timeline))
    chunk = chunks(timeline)
    parts = [f'<text class="t" x="4" y="18">{title}</text>']
    idle = f'width="{timeline.makespan_s * scale:.2f}" height="{_BAR}"'
    for rank, spans in enumerate(timeline.by_rank):
        y = _TITLE + rank * _ROW
        parts.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        parts.append(f'<rect class="idle" x="{_LEFT}" y="{y}" {idle}/>')
        for span in spans:
            x = _LEFT + (span.start_s - timeline.start_s) * scale
            color = LOOKS[span.action.kind].rgb[chunk[span.action.stage] % 2]
            parts.append(_bar(timeline, span, x, y, scale, color))
    x = _LEFT
    bottom = _TITLE + timeline.ranks * _ROW + 8
    for kind in kinds(timeline):
        look = LOOKS[kind]
        parts.append(f'<rect x="{x}" y="{bottom}" width="14" height="14" fill="{look.rgb[0]}"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom + 11}">{kind} {escape(look.word)}</text>')
        x += 40 + round(_CHARACTER * (len(look.word) + 2))
    size = f'width="{width}" height="{bottom + 24}" viewBox="0 0 {width} {bottom + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def _bar(timeline: Timeline, span: Span, x: float, y: int, scale: float, color: str) -> str:
    """Draws a bar with its times as a tooltip, and with its name if it has room for it."""
    action = span.action
    wide = (span.end_s - span.start_s) * scale
    name = f"{action.kind}{action.microbatch}"
    text = f'<text x="{x + wide / 2:.2f}" y="{y + 14}">{name}</text>'
    if len(name) * _CHARACTER + 2 > wide:
        text = ""
    start_s = span.start_s - timeline.start_s
    end_s = span.end_s - timeline.start_s
    place = f'x="{x:.2f}" y="{y}" width="{max(wide - 0.5, 0.2):.2f}" height="{_BAR}"'
    return (
        f'<g class="bar"><title>{action} on rank {span.rank}: {start_s:.6g} to {end_s:.6g}</title>'
        f'<rect {place} fill="{color}"/>{text}</g>'
    )

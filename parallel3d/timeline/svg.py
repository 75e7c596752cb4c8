"""A timeline as SVG for a page: self-contained, each bar with its times as a tooltip, light or dark as the page is."""

from __future__ import annotations

from xml.sax.saxutils import escape

from parallel3d.timeline.draw import LOOKS, chunks, headline, kinds
from parallel3d.timeline.spans import Span, Timeline

_ROW, _BAR, _LEFT, _TITLE, _CHARACTER = 24, 20, 64, 28, 6.2  # pixels
_STYLE = """\
text { font: 10px ui-monospace, monospace; fill: #1a1a1a } .t { font-size: 13px } .idle { fill: #ececec }
.bar text { fill: #101010; text-anchor: middle }
@media (prefers-color-scheme: dark) { .page > text, .rows text { fill: #e8e8e8 } .idle { fill: #333333 } }
"""


def draw_svg(*timelines: Timeline, width: int = 1200, detailed: bool = True) -> str:
    """Draws one picture of `width` pixels. Without `detailed` it has bars alone, no names or times, and a tenth of the
    bytes."""
    longest_s = max((timeline.makespan_s for timeline in timelines), default=0.0) or 1.0
    scale = (width - _LEFT - 8) / longest_s  # pixels a second
    parts = []
    top = 0
    for timeline in timelines:
        parts.append(f'<text class="t" x="4" y="{top + 18}">{escape(headline(timeline))}</text>')
        chunk = chunks(timeline)
        idle = f'width="{timeline.makespan_s * scale:.2f}" height="{_BAR}"'
        for rank, spans in enumerate(timeline.by_rank):
            y = top + _TITLE + rank * _ROW
            parts.append(f'<g class="rows"><text x="4" y="{y + 14}">rank {rank}</text></g>')
            parts.append(f'<rect class="idle" x="{_LEFT}" y="{y}" {idle}/>')
            paths: dict[str, list[str]] = {}  # without details, all bars of a colour are one path
            for span in spans:
                x = _LEFT + (span.start_s - timeline.start_s) * scale
                wide = (span.end_s - span.start_s) * scale
                color = LOOKS[span.action.kind].rgb[chunk[span.action.stage] % 2]
                if detailed:
                    parts.append(_bar(timeline, span, x, y, wide, color))
                else:
                    bar = max(wide - 0.5, 0.2)
                    paths.setdefault(color, []).append(f"M{x:.1f} {y}h{bar:.1f}v{_BAR}h-{bar:.1f}z")
            parts += [f'<path fill="{color}" d="{"".join(each)}"/>' for color, each in paths.items()]
        top += _TITLE + timeline.ranks * _ROW + 8
    x = _LEFT
    for kind in kinds(timelines):
        look = LOOKS[kind]
        parts.append(f'<rect x="{x}" y="{top}" width="14" height="14" fill="{look.rgb[0]}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + 11}">{kind} {escape(look.word)}</text>')
        x += 40 + round(_CHARACTER * (len(look.word) + 2))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="page" width="{width}" height="{top + 24}"'
    return "\n".join(
        [
            f'{head} viewBox="0 0 {width} {top + 24}" role="img">',
            f"<title>{escape('; '.join(map(headline, timelines)))}</title>",
            f"<style>{_STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _bar(timeline: Timeline, span: Span, x: float, y: int, wide: float, color: str) -> str:
    """Draws a bar with its times as a tooltip, and the fullest name that it has room for."""
    action = span.action
    names = [f"{action.kind}{action.microbatch}", action.kind.value]
    if timeline.stages > timeline.ranks:
        names.insert(0, str(action))
    name = next((name for name in names if len(name) * _CHARACTER + 2 <= wide), "")
    text = f'<text x="{x + wide / 2:.2f}" y="{y + 14}">{name}</text>' if name else ""
    start_s, end_s = span.start_s - timeline.start_s, span.end_s - timeline.start_s
    return (
        f'<g class="bar"><title>{action} on rank {span.rank}: {start_s:.6g} to {end_s:.6g}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{max(wide - 0.5, 0.2):.2f}" height="{_BAR}" fill="{color}"/>{text}</g>'
    )

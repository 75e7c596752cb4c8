"""A timeline as SVG for a page: self-contained, each bar with its times as a tooltip, light or dark as the page is."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from parallel3d.timeline.draw import LOOKS, chunks, headline, kinds, labels
from parallel3d.timeline.spans import Timeline

_ROW, _BAR, _LEFT, _TITLE, _CHARACTER = 24, 20, 64, 28, 6.2  # pixels
_STYLE = """\
text { font: 10px ui-monospace, monospace; fill: #1a1a1a } .t { font-size: 13px } .idle { fill: #ececec }
.bar text { fill: #101010; text-anchor: middle }
@media (prefers-color-scheme: dark) { .page > text, .rows text { fill: #e8e8e8 } .idle { fill: #333333 } }
"""


def draw_svg(*timelines: Timeline, width: int = 1200, detailed: bool = True) -> str:
    """Draws one picture of `width` pixels. Without `detailed` it has bars alone, no names or times, and a tenth of the
    bytes."""
    rows = _rows if detailed else _plain_rows
    longest_s = max((timeline.makespan_s for timeline in timelines), default=0.0) or 1.0
    scale = (width - _LEFT - 8) / longest_s  # pixels a second
    parts = []
    top = 0
    for timeline in timelines:
        parts.append(f'<text class="t" x="4" y="{top + 18}">{escape(headline(timeline))}</text>')
        parts += rows(timeline, top + _TITLE, scale)
        top += _TITLE + timeline.ranks * _ROW + 8
    parts += _legend(timelines, top)
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


def _rows(timeline: Timeline, top: int, scale: float) -> Iterator[str]:
    chunk = chunks(timeline)
    for rank, spans in enumerate(timeline.by_rank):
        y = top + rank * _ROW
        yield from _empty_row(timeline, rank, y, scale)
        for span in spans:
            x = _LEFT + (span.start_s - timeline.start_s) * scale
            wide = (span.end_s - span.start_s) * scale
            color = LOOKS[span.action.kind].rgb[chunk[span.action.stage] % 2]
            told = f"{span.action} on rank {rank}: {_time(span.start_s - timeline.start_s)} to "
            told += _time(span.end_s - timeline.start_s)
            names = labels(span.action, several_stages=timeline.stages > timeline.ranks)
            name = next((name for name in names if len(name) * _CHARACTER + 2 <= wide), "")
            text = f'<text x="{x + wide / 2:.2f}" y="{y + 14}">{name}</text>' if name else ""
            yield (
                f'<g class="bar"><title>{told}</title><rect x="{x:.2f}" y="{y}" width="{max(wide - 0.5, 0.2):.2f}" '
                f'height="{_BAR}" fill="{color}"/>{text}</g>'
            )


def _plain_rows(timeline: Timeline, top: int, scale: float) -> Iterator[str]:
    """Yields one path for all bars of a colour on a rank."""
    chunk = chunks(timeline)
    for rank, spans in enumerate(timeline.by_rank):
        y = top + rank * _ROW
        yield from _empty_row(timeline, rank, y, scale)
        bars: dict[str, list[str]] = {}
        for span in spans:
            x = _LEFT + (span.start_s - timeline.start_s) * scale
            wide = max((span.end_s - span.start_s) * scale - 0.5, 0.2)
            color = LOOKS[span.action.kind].rgb[chunk[span.action.stage] % 2]
            bars.setdefault(color, []).append(f"M{x:.1f} {y}h{wide:.1f}v{_BAR}h-{wide:.1f}z")
        yield from (f'<path fill="{color}" d="{"".join(each)}"/>' for color, each in bars.items())


def _empty_row(timeline: Timeline, rank: int, y: int, scale: float) -> Iterator[str]:
    yield f'<g class="rows"><text x="4" y="{y + 14}">rank {rank}</text></g>'
    yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{timeline.makespan_s * scale:.2f}" height="{_BAR}"/>'


def _legend(timelines: tuple[Timeline, ...], top: int) -> Iterator[str]:
    x = _LEFT
    for kind in kinds(timelines):
        look = LOOKS[kind]
        yield f'<rect x="{x}" y="{top}" width="14" height="14" fill="{look.rgb[0]}"/>'
        yield f'<text x="{x + 20}" y="{top + 11}">{kind} {escape(look.word)}</text>'
        x += 40 + round(_CHARACTER * (len(look.word) + 2))


def _time(seconds: float) -> str:
    return f"{seconds:.6g}"

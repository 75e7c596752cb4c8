"""The figures of a plan's HTML file: memory of each pipeline rank, a step's time by cause.

Pure functions of a plan's own numbers, which give SVG elements. Colours are Okabe and Ito's, told
apart by all eyes; each mark carries its figure as a tooltip, and a figure's title says what it
shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.report.text import MEMORY_KINDS, TIME_KINDS
from parallel3d.planner.time.step import TimeParts

_WIDTH = 900
_LEFT = 90
_RIGHT = 90
_ROW = 24
_BAR = 18
_PALETTE = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#f0e442",
    "#cc79a7",
    "#d55e00",
    "#999999",
    "#5f5f5f",
)
COLORS = dict(zip(MEMORY_KINDS, _PALETTE, strict=True))
_SPAN = _WIDTH - _LEFT - _RIGHT


def memory_figure(ranks: Sequence[RankMemory], usable: float, device: float) -> str:
    """A bar for each of these pipeline ranks, stacked by kind, with lines at what may be used and
    at what there is."""
    scale = _SPAN / max(device, *(memory.total for memory in ranks))
    drawn: list[str] = []
    for row, memory in enumerate(ranks):
        x = float(_LEFT)
        drawn.append(_text(4, row * _ROW + 13, f"rank {memory.rank}"))
        for kind in MEMORY_KINDS:
            if bytes_ := getattr(memory, kind):
                told = f"rank {memory.rank}, {kind}: {bytes_ / GIB:.2f} GiB"
                drawn.append(_bar(x, row, bytes_ * scale, COLORS[kind], told))
                x += bytes_ * scale
        drawn.append(
            _text(_WIDTH - 4, row * _ROW + 13, f"{memory.total / GIB:.1f} GiB", anchor="end")
        )
    height = len(ranks) * _ROW
    drawn += [
        f'<path class="limit" d="M{_LEFT + bytes_ * scale:.1f} 0v{height}"/>'
        for bytes_ in (usable, device)
    ]
    drawn.append(
        _text(
            _LEFT + usable * scale - 4, height + 14, f"usable {usable / GIB:.1f} GiB", anchor="end"
        )
    )
    for at, (kind, color) in enumerate(COLORS.items()):
        x = _LEFT + at % 6 * 130
        y = height + 26 + at // 6 * 18
        drawn.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>'
            + _text(x + 17, y + 10, kind)
        )
    return _svg(
        height + 60, "Memory of each pipeline rank by kind, against what a device may use", drawn
    )


def time_figure(parts: TimeParts) -> str:
    """A waterfall: every cause begins where the one before it ends."""
    kinds = [kind for kind in TIME_KINDS if getattr(parts, kind) > 0]
    scale = _SPAN / parts.total
    x = float(_LEFT)
    drawn = []
    for row, kind in enumerate(kinds):
        seconds = getattr(parts, kind)
        share = f"{seconds / parts.total:.1%}"
        color = _PALETTE[row % len(_PALETTE)]
        drawn.append(_text(4, row * _ROW + 13, kind))
        drawn.append(
            _bar(x, row, max(seconds * scale, 1.0), color, f"{kind}: {seconds:.3g} s, {share}")
        )
        x += seconds * scale
        drawn.append(_text(x + 6, row * _ROW + 13, share))
    return _svg(
        len(kinds) * _ROW, f"A step of {parts.total:.3g} s by cause, on the busiest rank", drawn
    )


def _bar(x: float, row: int, wide: float, color: str, told: str) -> str:
    title = f"<title>{escape(told)}</title>"
    place = f'x="{x:.1f}" y="{row * _ROW}" width="{wide:.1f}" height="{_BAR}"'
    return f'<rect {place} fill="{color}">{title}</rect>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])

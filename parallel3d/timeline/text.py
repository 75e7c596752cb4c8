"""A timeline as text for a terminal: one line per rank, time from left to right."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby

from parallel3d.schedules.schedule import Action
from parallel3d.timeline.draw import LOOKS, chunks, headline, kinds
from parallel3d.timeline.spans import Span, Timeline

_IDLE = "."
_MOST_PARTS = 4  # the shortest action is cut into so many steps at most
_NARROWEST = 20  # columns for the bars, however narrow the terminal


def draw_text(*timelines: Timeline, width: int = 120, color: bool = False) -> str:
    """Draws at most `width` columns of plain ASCII; with `color`, bars are coloured backgrounds (ANSI, 256 colours).

    Where all times are multiples of one step and there is room, a step has as many columns as the longest name of an
    action needs. Otherwise time is scaled to the width, and a bar too narrow for its name has the letter of its kind.
    """
    prefix = max((len(f"rank {timeline.ranks - 1} |") for timeline in timelines), default=0)
    longest_s = max((timeline.makespan_s for timeline in timelines), default=0.0)
    scale = _scale(timelines, longest_s, max(_NARROWEST, width - prefix))
    lines = []
    for timeline in timelines:
        lines.append(headline(timeline))
        painter = _Painter(timeline, scale, color)
        for rank, spans in enumerate(timeline.by_rank):
            lines.append(f"{f'rank {rank}':<{prefix - 2}} |{painter.bars(spans)}".rstrip())
    lines.append(_legend(timelines, scale, color))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Scale:
    column_s: float  # what a column stands for
    with_stages: bool  # whether names say the stage


def _scale(timelines: tuple[Timeline, ...], longest_s: float, room: int) -> _Scale:
    """Chooses the finest scale that fits into `room` columns."""
    several = any(timeline.stages > timeline.ranks for timeline in timelines)
    step_s = _step(timelines)
    if step_s <= 0 or longest_s / step_s > room:
        return _Scale(longest_s / room or 1.0, with_stages=False)
    room_of_step = int(room / (longest_s / step_s))
    for with_stages in (True, False) if several else (False,):
        actions = {span.action for timeline in timelines for span in timeline.spans}
        longest_name = max(len(_name(action, with_stages=with_stages)) for action in actions)
        if longest_name < room_of_step:
            return _Scale(step_s / (longest_name + 1), with_stages)
    return _Scale(step_s / room_of_step, with_stages=False)


def _step(timelines: tuple[Timeline, ...]) -> float:
    """Finds a time that all times are multiples of: the shortest action or a small part of it. Returns 0 if neither
    is."""
    times = {
        time
        for timeline in timelines
        for span in timeline.spans
        for time in (span.start_s - timeline.start_s, span.end_s - span.start_s)
    }
    shortest_s = min((time for time in times if time > 0), default=0.0)
    for parts in range(1, _MOST_PARTS + 1) if shortest_s else ():
        step_s = shortest_s / parts
        if all(abs(time / step_s - round(time / step_s)) < 1e-6 for time in times):
            return step_s
    return 0.0


def _name(action: Action, *, with_stages: bool) -> str:
    return str(action) if with_stages else f"{action.kind}{action.microbatch}"


class _Painter:
    """Draws a timeline's ranks. Where names leave out the stage, a rank's second, fourth, ... stage has small
    letters."""

    def __init__(self, timeline: Timeline, scale: _Scale, color: bool) -> None:
        self._start_s = timeline.start_s
        self._columns = round(timeline.makespan_s / scale.column_s)
        self._chunks = chunks(timeline)
        self._scale = scale
        self._color = color

    def bars(self, spans: tuple[Span, ...]) -> str:
        """Draws one rank; each column shows the action in its middle."""
        starts = [span.start_s for span in spans]
        shown: list[int] = []
        for column in range(self._columns):
            middle_s = self._start_s + (column + 0.5) * self._scale.column_s
            at = bisect_right(starts, middle_s) - 1
            shown.append(at if at >= 0 and middle_s < spans[at].end_s else -1)
        idle = " " if self._color else _IDLE
        runs = ((at, len(list(run))) for at, run in groupby(shown))
        return "".join(idle * length if at < 0 else self._bar(spans[at].action, length) for at, length in runs)

    def _bar(self, action: Action, length: int) -> str:
        shade = self._chunks[action.stage] % 2
        name = _name(action, with_stages=self._scale.with_stages)
        if len(name) >= length > 0:
            name = action.kind.value
        if shade and not self._scale.with_stages:
            name = name.lower()
        wide = max(1, length - 1)  # a gap before the next
        gap = " " * (length - wide)
        if self._color:
            return f"\x1b[30;48;5;{LOOKS[action.kind].ansi[shade]}m{name:<{wide}}\x1b[0m{gap}"
        return f"{name:-<{wide}}{gap}"


def _legend(timelines: tuple[Timeline, ...], scale: _Scale, color: bool) -> str:
    words = []
    for kind in kinds(timelines):
        look = LOOKS[kind]
        words.append(f"\x1b[30;48;5;{look.ansi[0]}m {kind} \x1b[0m {look.word}" if color else f"{kind} {look.word}")
    if not color:
        words.append(f"{_IDLE} idle")
    if scale.with_stages:
        return f"{', '.join(words)} (2F0: stage 2, forward, microbatch 0)"
    several = any(timeline.stages > timeline.ranks for timeline in timelines)
    small = "; in small letters for a rank's second stage" if several else ""
    return f"{', '.join(words)} (F0: forward, microbatch 0{small})"

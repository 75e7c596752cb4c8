"""A timeline as text for a terminal: one line per rank, time from left to right."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby

from parallel3d.schedules.schedule import Action
from parallel3d.timeline.draw import LOOKS, chunks, headline, kinds
from parallel3d.timeline.spans import Timeline

_IDLE = "."
_MOST_PARTS = 4  # the shortest action is cut into so many steps at most
_NARROWEST = 20  # columns for the bars, however narrow the terminal


def draw_text(*timelines: Timeline, width: int = 120, color: bool = False) -> str:
    """Draws at most `width` columns of plain ASCII; with `color`, bars are coloured backgrounds (ANSI, 256 colours).

    Where all times are multiples of one step and there is room, a step has as many columns as the longest name needs.
    Otherwise time is scaled to the width, and a bar too narrow for its name has the letter of its kind. Where names
    leave out the stage, a rank's second, fourth, ... stage has small letters.
    """
    prefix = max((len(f"rank {timeline.ranks - 1} |") for timeline in timelines), default=0)
    has_several_stages = any(timeline.stages > timeline.ranks for timeline in timelines)
    column_s, with_stages = _scale(timelines, max(_NARROWEST, width - prefix), has_several_stages)
    lines = []
    for timeline in timelines:
        lines.append(headline(timeline))
        chunk = chunks(timeline)
        columns = range(round(timeline.makespan_s / column_s))
        middles_s = [timeline.start_s + (column + 0.5) * column_s for column in columns]
        for rank, spans in enumerate(timeline.by_rank):
            starts_s = [span.start_s for span in spans]
            last_begun = [bisect_right(starts_s, middle_s) - 1 for middle_s in middles_s]
            shown = [
                spans[at].action if at >= 0 and middle_s < spans[at].end_s else None
                for at, middle_s in zip(last_begun, middles_s, strict=True)
            ]
            bars = ""
            for action, run in groupby(shown):
                length = len(list(run))
                if action is None:
                    bars += (" " if color else _IDLE) * length
                else:
                    bars += _bar(action, length, chunk[action.stage] % 2, with_stages=with_stages, color=color)
            lines.append(f"{f'rank {rank}':<{prefix - 2}} |{bars}".rstrip())
    looks = [(kind, LOOKS[kind]) for kind in kinds(timelines)]
    if color:
        legend = [f"\x1b[30;48;5;{look.ansi[0]}m {kind} \x1b[0m {look.word}" for kind, look in looks]
    else:
        legend = [*(f"{kind} {look.word}" for kind, look in looks), f"{_IDLE} idle"]
    small = "; in small letters for a rank's second stage" if has_several_stages else ""
    example = "2F0: stage 2, forward, microbatch 0" if with_stages else f"F0: forward, microbatch 0{small}"
    return "\n".join([*lines, f"{', '.join(legend)} ({example})"]) + "\n"


def _scale(timelines: tuple[Timeline, ...], room: int, has_several_stages: bool) -> tuple[float, bool]:
    """Chooses the finest scale that fits into `room` columns: the time of a column, and whether names say the stage."""
    longest_s = max((timeline.makespan_s for timeline in timelines), default=0.0)
    step_s = _step(timelines)
    if step_s <= 0 or longest_s / step_s > room:
        return longest_s / room or 1.0, False
    room_of_step = int(room / (longest_s / step_s))
    actions = {span.action for timeline in timelines for span in timeline.spans}
    for with_stages in (True, False) if has_several_stages else (False,):
        longest_name = max(len(_name(action, with_stages)) for action in actions)
        if longest_name < room_of_step:
            return step_s / (longest_name + 1), with_stages
    return step_s / room_of_step, False


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


def _name(action: Action, with_stages: bool) -> str:
    return str(action) if with_stages else f"{action.kind}{action.microbatch}"


def _bar(action: Action, length: int, shade: int, *, with_stages: bool, color: bool) -> str:
    name = _name(action, with_stages)
    if len(name) >= length > 0:
        name = action.kind.value
    if shade and not with_stages:
        name = name.lower()
    wide = max(1, length - 1)  # a gap before the next
    gap = " " * (length - wide)
    if color:
        return f"\x1b[30;48;5;{LOOKS[action.kind].ansi[shade]}m{name:<{wide}}\x1b[0m{gap}"
    return f"{name:-<{wide}}{gap}"

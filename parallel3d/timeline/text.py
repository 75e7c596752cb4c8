"""A timeline as text for a terminal: one line per rank, time from left to right."""

from __future__ import annotations

from parallel3d.schedules.schedule import Action
from parallel3d.timeline.draw import LOOKS, chunks, headline, kinds
from parallel3d.timeline.spans import Timeline

_IDLE = "."
_NARROWEST = 20  # columns for the bars, however narrow the terminal


def draw_text(timeline: Timeline, *, width: int = 120) -> str:
    """Draws at most `width` columns of plain ASCII.

    If all times are multiples of the shortest one and there is room, that one has as many columns
    as the longest name needs. Otherwise time is scaled to the width, and a bar that is too narrow
    for its name has the letter of its kind. A rank's second, fourth, ... stage has small letters.
    """
    prefix = len(f"rank {timeline.ranks - 1} |")
    column_s = _column_s(timeline, max(_NARROWEST, width - prefix))
    columns = round(timeline.makespan_s / column_s)
    chunk = chunks(timeline)
    lines = [headline(timeline)]
    for rank, spans in enumerate(timeline.by_rank):
        row = [_IDLE] * columns
        for span in spans:
            start = round((span.start_s - timeline.start_s) / column_s)
            end = round((span.end_s - timeline.start_s) / column_s)
            row[start:end] = _bar(
                span.action, end - start, is_small=chunk[span.action.stage] % 2 > 0
            )
        lines.append(f"{f'rank {rank}':<{prefix - 2}} |{''.join(row)}".rstrip())
    legend = [f"{kind} {LOOKS[kind].word}" for kind in kinds(timeline)]
    lines.append(f"{', '.join(legend)}, {_IDLE} idle (F0: forward, microbatch 0)")
    return "\n".join(lines) + "\n"


def _column_s(timeline: Timeline, room: int) -> float:
    """Returns the time of a column: the finest scale that fits into `room` columns."""
    longest_s = timeline.makespan_s
    times = {span.end_s - span.start_s for span in timeline.spans}
    times |= {span.start_s - timeline.start_s for span in timeline.spans}
    step_s = min((time for time in times if time > 0), default=0.0)
    if step_s == 0 or longest_s / step_s > room:
        return longest_s / room or 1.0
    if any(abs(time / step_s - round(time / step_s)) > 1e-6 for time in times):
        return longest_s / room
    longest_name = max(len(_name(span.action)) for span in timeline.spans)
    return step_s / min(int(room * step_s / longest_s), longest_name + 1)


def _name(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"


def _bar(action: Action, length: int, *, is_small: bool) -> str:
    name = _name(action) if len(_name(action)) < length else action.kind.value
    name = name.lower() if is_small else name
    wide = max(1, length - 1)  # a gap before the next
    return f"{name:-<{wide}}{' ' * (length - wide)}"[:length]

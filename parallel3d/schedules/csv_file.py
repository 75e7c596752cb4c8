"""Schedules in files, in the format of torch.distributed.pipelining's compute schedules.

One line a rank, one cell an action: `2F0` is stage 2, forward, microbatch 0. An empty cell is a
hole. Two actions that torch overlaps, `(2F1;5B0)OVERLAP_F_B`, are read as one after the other; its
communications (sends, receives, gathers, reductions) are passed over, because here they follow from
the compute.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from parallel3d.errors import ScheduleError
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.schedule import Action, Kind, Schedule

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")


def to_csv(schedule: Schedule) -> str:
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def load_schedule(path: Path) -> Schedule:
    """Reads a schedule from a file and checks it. Raises ScheduleError naming the file, the rank,
    the action and the reason."""
    try:
        return from_csv(path.read_text(encoding="utf-8"), name=str(path))
    except OSError as error:
        raise ScheduleError(f"schedule {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"schedule {path}: is not text") from error


def from_csv(text: str, *, name: str) -> Schedule:
    """Reads a schedule from a file's text and checks it. Which rank holds a stage and how many
    microbatches there are follows from the actions; `name` is for messages."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"schedule {name}: is no CSV ({error})") from error
    while rows and not any(map(str.strip, rows[-1])):  # empty lines at the end of a file
        rows.pop()
    ranks = tuple(tuple(_actions(row, rank, name)) for rank, row in enumerate(rows))
    holder: dict[int, int] = {}  # the rank of each stage
    for rank, actions in enumerate(ranks):
        for action in actions:
            if holder.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"schedule {name}: rank {rank}, {action}: its stage stands on rank "
                    f"{holder[action.stage]} already"
                )
    if not holder:
        raise ScheduleError(
            f"schedule {name}: has no action; a line is a rank, a cell an action such as 0F0"
        )
    every_action = list(chain.from_iterable(ranks))
    microbatches = {action.microbatch for action in every_action}
    for what, numbers in (("stage", set(holder)), ("microbatch", microbatches)):
        if len(numbers) <= max(numbers):
            gap = min(set(range(len(numbers))) - numbers)
            raise ScheduleError(
                f"schedule {name}: {what} {gap} stands nowhere, and {what} {max(numbers)} does"
            )
    schedule = Schedule(
        name=name,
        placement=tuple(holder[stage] for stage in range(len(holder))),
        microbatches=len(microbatches),
        ranks=ranks,
        trains=any(action.kind is not Kind.FORWARD for action in every_action),
    )
    check_schedule(schedule)
    return schedule


def _actions(row: list[str], rank: int, name: str) -> Iterator[Action]:
    for column, cell in enumerate(row):
        overlapped = _OVERLAP.fullmatch(cell.strip())
        words = overlapped[1].split(";") if overlapped else [cell]
        for word in map(str.strip, words):
            match = _ACTION.fullmatch(word)
            if match:
                yield Action(int(match[1]), Kind(match[2]), int(match[3]))
            elif word and not _DERIVED.fullmatch(word):
                raise ScheduleError(
                    f"schedule {name}: rank {rank}, column {column}, {word[:40]!r}: is no action; "
                    "write stage, one of F B I W, and microbatch, such as 0F0"
                )

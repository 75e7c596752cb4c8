"""Schedules in files, in the format of torch.distributed.pipelining's compute schedules.

One line a rank, one cell an action: `2F0` is stage 2, forward, microbatch 0. An empty cell is a
hole. Two actions that torch overlaps, `(2F1;5B0)OVERLAP_F_B`, are read as one after the other; its
communications (sends, receives, gathers, reductions) are passed over, because here they follow from
the compute.
"""

from __future__ import annotations

import re
from pathlib import Path

from parallel3d.errors import ScheduleError
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.schedule import Action, Kind, Schedule

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_PASSED_OVER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)|")


def to_csv(schedule: Schedule) -> str:
    """Returns a schedule as the text of a file, with a line for each rank.

    Example:
        >>> schedule = parallel3d.build_schedule("1f1b", pp=2, microbatches=2)
        >>> print(parallel3d.to_csv(schedule), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def load_schedule(path: Path) -> Schedule:
    """Reads a schedule from a file and checks it. Raises ScheduleError naming the file, the rank,
    the action and the reason.

    Example:
        >>> schedule = parallel3d.load_schedule(Path("mine.csv"))
        >>> schedule.stages, schedule.microbatches
        (2, 2)
    """
    try:
        return from_csv(path.read_text(encoding="utf-8"), name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not text")
        raise ScheduleError(f"schedule {path}: cannot be read: {reason}") from error


def from_csv(text: str, *, name: str) -> Schedule:
    """Reads a schedule from a file's text and checks it. Which rank holds a stage and how many
    microbatches there are follows from the actions; `name` is for messages."""
    said = f"schedule {name}: "
    ranks = []
    holder: dict[int, int] = {}  # the rank of each stage
    microbatches: set[int] = set()
    for rank, line in enumerate(text.rstrip().splitlines()):
        actions = []
        for cell in re.sub(r"[\"()]|OVERLAP_F_B", "", line).replace(";", ",").split(","):
            found = _ACTION.fullmatch(cell.strip())
            if found:
                action = Action(int(found[1]), Kind(found[2]), int(found[3]))
                actions.append(action)
                holder.setdefault(action.stage, rank)
                microbatches.add(action.microbatch)
            elif not _PASSED_OVER.fullmatch(cell.strip()):
                raise ScheduleError(
                    f"{said}rank {rank}, {cell[:40]!r}: is no action; write stage, one of F B I W, "
                    "and microbatch, such as 0F0"
                )
        ranks.append(tuple(actions))
    for what, numbers in (("stage", holder), ("microbatch", microbatches)):
        if not numbers or len(numbers) <= max(numbers):
            raise ScheduleError(f"{said}must have actions of each {what}, from {what} 0 on")
    schedule = Schedule(
        name=name,
        placement=tuple(rank for _, rank in sorted(holder.items())),
        microbatches=len(microbatches),
        ranks=tuple(ranks),
        trains=any(action.kind is not Kind.FORWARD for action in sum(ranks, ())),
    )
    check_schedule(schedule)
    return schedule

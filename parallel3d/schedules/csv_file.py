"""Reads and writes schedules in the CSV format of torch.distributed.pipelining.

Each line is a rank and each cell an action: `2F0` is stage 2, forward, microbatch 0. An empty cell
is idle time. Overlapped actions such as `(2F1;5B0)OVERLAP_F_B` are read one after the other. Cells
with communication (SEND, RECV, UNSHARD, RESHARD, REDUCE_GRAD) are ignored, because parallel3d
derives communication from the compute actions.
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
    """Returns a schedule as CSV text with one line per rank.

    Example:
        >>> schedule = parallel3d.build_schedule("1f1b", pp=2, microbatches=2)
        >>> print(parallel3d.to_csv(schedule), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def load_schedule(path: Path) -> Schedule:
    """Reads a schedule from a CSV file and checks it.

    Args:
        path: File in the format of `to_csv`, or a compute schedule of torch.distributed.pipelining.

    Returns:
        Schedule named `str(path)`. Placement and number of microbatches follow from the actions.

    Raises:
        ScheduleError: The file cannot be read, or the schedule is wrong.

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
    """Parses a schedule from CSV text and checks it. `name` appears in error messages."""
    said = f"schedule {name}: "
    ranks = []
    holder: dict[int, int] = {}  # stage -> rank
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
                    f"{said}rank {rank}, {cell[:40]!r}: is not an action; write stage, kind "
                    "(F, B, I or W) and microbatch, for example 0F0"
                )
        ranks.append(tuple(actions))
    for what, numbers in (("stage", holder), ("microbatch", microbatches)):
        if not numbers or len(numbers) <= max(numbers):
            raise ScheduleError(f"{said}must have actions of every {what} from {what} 0 on")
    schedule = Schedule(
        name=name,
        placement=tuple(rank for _, rank in sorted(holder.items())),
        microbatches=len(microbatches),
        ranks=tuple(ranks),
        trains=any(action.kind is not Kind.FORWARD for action in sum(ranks, ())),
    )
    check_schedule(schedule)
    return schedule

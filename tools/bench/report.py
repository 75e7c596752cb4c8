"""Results that compare parallel3d ("ours") with a peer, as a table or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from parallel3d.errors import ConfigError

_COLUMNS = ("case", "unit", "ours", "peer", "bar", " ratio")
_TO_THE_LEFT = (0, 1, 5)  # Left-aligned columns. The last has padded numbers, then text.


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a benchmark. None selects its default."""

    rounds: int | None = None
    steps: int | None = None  # Number of steps per round.
    case: str = ""  # run only cases with this in their name
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """Comparison of one quantity in one case. Smaller is better."""

    case: str
    ours: float
    peer: float
    unit: str
    ratio: float  # ours / peer
    bar: float | None  # largest ratio. None: no limit


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Mean time per step."""

    wall_s: float
    cpu_s: float  # CPU time in seconds, summed over ranks.


@dataclass(frozen=True, kw_only=True)
class Round:
    """Timings of parallel3d and the peer, one directly after the other."""

    ours: Timing
    peer: Timing


def chosen(cases: Iterable[str], options: Options) -> list[str]:
    """Returns the selected case names. Raises ConfigError with all names if none matches."""
    names = list(cases)
    found = [name for name in names if options.case in name]
    if not found:
        raise ConfigError(f"--case {options.case}: matches no case; choose from {', '.join(names)}")
    return found


def announced(cases: Sequence[str]) -> Iterator[str]:
    """Yields the case names. Prints each to stderr first."""
    for number, name in enumerate(cases, start=1):
        print(f"[{number}/{len(cases)}] {name}", file=sys.stderr, flush=True)
        yield name


def rows_against_peer(
    case: str, rounds: Sequence[Round], cpu_bar: float | None, wall_bar: float | None = None
) -> list[ResultRow]:
    """Returns a row of CPU time and one of wall time, with medians over the rounds.

    The ratio is the median of the rounds' ratios, because a disturbance often affects both timings
    of a round.
    """
    cpu = [(round.ours.cpu_s, round.peer.cpu_s) for round in rounds]
    wall = [(round.ours.wall_s, round.peer.wall_s) for round in rounds]
    return [
        row_of(case, "cpu_s_per_step", cpu, cpu_bar),
        row_of(case, "wall_s_per_step", wall, wall_bar),
    ]


def rows_against_one_process(
    case: str, rounds: Sequence[Round], one_process: Sequence[Round]
) -> list[ResultRow]:
    """Compares a layout with the peer of another case, the plain loop in one process."""
    cpu = (median(r.ours.cpu_s for r in rounds), median(r.peer.cpu_s for r in one_process))
    wall = (median(r.ours.wall_s for r in rounds), median(r.peer.wall_s for r in one_process))
    name = f"{case} vs one process"
    return [row_of(name, "cpu_s_per_step", [cpu]), row_of(name, "wall_s_per_step", [wall])]


def row_of(
    case: str, unit: str, pairs: Sequence[tuple[float, float]], bar: float | None = None
) -> ResultRow:
    """Returns a row with the medians of (ours, peer) pairs and of their ratios."""
    ours, peers = zip(*pairs, strict=True)
    ratio = median(ours / peer for ours, peer in pairs)
    return ResultRow(
        case=case, ours=median(ours), peer=median(peers), unit=unit, ratio=ratio, bar=bar
    )


def as_json(rows: Sequence[ResultRow]) -> str:
    """Returns a JSON object `{"results": [...]}` with the fields of each row."""
    return json.dumps({"results": [asdict(row) for row in rows]}, indent=2)


def as_table(rows: Sequence[ResultRow]) -> str:
    """Returns an aligned table that marks ratios above their bar."""
    cells = [_COLUMNS]
    for row in rows:
        bar = "-" if row.bar is None else f"{row.bar:.2f}"
        over = " over the bar" if row.bar is not None and row.ratio > row.bar else ""
        cells.append(
            (
                row.case,
                row.unit,
                f"{row.ours:.4f}",
                f"{row.peer:.4f}",
                bar,
                f"{row.ratio:6.2f}{over}",
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [
            cell.ljust(width) if column in _TO_THE_LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)

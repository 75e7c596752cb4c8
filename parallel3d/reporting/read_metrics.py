"""Reads metrics.jsonl fast, and chooses the lines that a chart needs.

A run can have 100,000 lines of 1.6 KB. Most of these bytes are details: the spread over ranks and
the memory by kind. Only a few chosen lines need them, so reading cuts them out before it parses.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.watch.step_clock import CAUSES

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

COUNTS = (
    "skipped_steps",
    "spikes",
    "rollbacks",
)
_NUMBERS = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "fullest_expert",
    "fullest_rank",
    "idle_experts",
    *COUNTS,
)
_DETAILS = (
    b'"time_spread_s": {',
    b'"memory_bytes": {',
)
_LARGEST_STEP = 1 << 53
_DECODER = json.JSONDecoder(parse_int=float)  # Even an integer of 1,000 digits becomes a float.


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Lines of a metrics.jsonl in the order of their steps.

    Args:
        path: File.
        offsets: Position of each line in the file.
        columns: Values of each line, such as `loss` or `tp` (seconds). NaN: no value.
        evaluations: Losses by step of each evaluation set by name.
        damaged: Number of complete lines that are not metrics.
    """

    path: Path
    offsets: Indices
    columns: dict[str, Numbers]
    evaluations: dict[str, dict[float, float]]
    damaged: int

    def details(self, chosen: Indices, key: str) -> list[dict[str, Any]]:
        """Returns `time_spread_s` or `memory_bytes` of the chosen lines. Without them: {}."""
        found = []
        with self.path.open("rb") as file:
            for offset in self.offsets[chosen].tolist():
                file.seek(offset)
                value = _decoded(file.readline()).get(key)
                found.append(value if isinstance(value, dict) else {})
        return found


def read_metrics(path: Path) -> Metrics:
    """Reads a metrics.jsonl. Ignores damaged lines and an incomplete last line. If a step occurs
    twice, the later line counts. Raises OSError if the file cannot be read."""
    values = array("d")
    offsets = array("q")
    evaluations: dict[str, dict[float, float]] = {}
    damaged = position = 0
    with path.open("rb") as file:
        for line in file:
            row = _decoded(_without_details(line))
            step = row.get("step")
            if type(step) is float and 0 <= step < _LARGEST_STEP:
                offsets.append(position)
                times = row.get("time_s")
                get_time = times.get if isinstance(times, dict) else {}.get
                found = [*map(row.get, _NUMBERS), *map(get_time, CAUSES)]
                values.extend([each if type(each) is float else math.nan for each in found])
                if row.get("val_loss") is not None:
                    for key, loss in row.items():
                        if key.startswith("val_loss") and type(loss) is float:
                            name = key[9:] or "validation"
                            evaluations.setdefault(name, {})[step] = loss
            elif line.endswith(b"\n"):
                damaged += 1
            position += len(line)
    keys = (*_NUMBERS, *CAUSES)
    table = np.frombuffer(values).reshape(-1, len(keys))
    steps_from_end = table[::-1, 0]
    _, from_end = np.unique(steps_from_end, return_index=True)
    order = len(table) - 1 - from_end
    return Metrics(
        path=path,
        offsets=np.array(offsets, dtype=np.int64)[order],
        columns=dict(zip(keys, table[order].T, strict=True)),
        evaluations=evaluations,
        damaged=damaged,
    )


def _without_details(line: bytes) -> bytes:
    for key in _DETAILS:
        start = line.find(key)
        if start >= 0:
            end = line.find(b"}", start) + 1
            line = line[:start] + b'"": 0' + line[end:]
    return line


def _decoded(line: bytes) -> dict[str, Any]:
    """Returns the object in a line, or an empty one."""
    try:
        row = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def extremes(columns: Iterable[Numbers], lines: int, buckets: int) -> Indices:
    """Chooses the lines to draw: of `buckets` ranges of lines, those with the least and the most of
    each column. So a spike of a single line is always among them."""
    width = max(1, math.ceil(lines / buckets))
    starts = np.arange(0, lines, width)
    chosen = [np.array([0, lines - 1])]
    for column in columns:
        padded = np.full(len(starts) * width, math.nan)
        padded[:lines] = column
        ranges = padded.reshape(-1, width)
        missing = np.isnan(ranges)
        least = np.where(missing, np.inf, ranges).argmin(axis=1)
        most = np.where(missing, -np.inf, ranges).argmax(axis=1)
        chosen.append(starts + least)
        chosen.append(starts + most)
    return np.unique(np.concatenate(chosen))


def short(values: Sequence[float] | Numbers) -> list[float | None]:
    """Rounds to six significant digits. NaN and infinity become None."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]

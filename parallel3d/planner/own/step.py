"""What an optimizer keeps and makes where that is not so many bytes for each number: Adafactor, of whose matrices the
means of rows and of columns are kept (`training.optimizers.adafactor`), and which steps a few parameters at a time; and
steps in float32 that are rounded stochastically (`training.rounding`), likewise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parallel3d.optimizers.assignment import WIDE_ELEMENTS, rounds
from parallel3d.planner.model.parameters import Table


def adafactor_states(tables: Iterable[Table], shards: int) -> int:
    """Bytes of the states of a rank's parameters, all in float32."""
    return 4 * sum(table.times * _statistics(table, shards) for table in tables)


def _statistics(table: Table, shards: int) -> int:
    """Of one of them: a number for each of its rows here, and one for each column; of a vector as many as it has."""
    numel = table.shard(shards) // table.times
    return numel if table.columns == 1 else numel // table.columns + table.columns


def adafactor_step(tables: Iterable[Table], shards: int, *, narrow: bool) -> float:
    """Bytes of the updates of a round, at most; `narrow`: parameters of 16 bits, whose gradients are widened, too, and
    then each of them."""
    return max(
        (sum(sizes) * (8 if narrow else 4) + 4 * narrow * max(sizes) for sizes in _rounds(tables, shards)), default=0
    )


def _rounds(tables: Iterable[Table], shards: int) -> Iterator[list[int]]:
    """Numbers of the parameters that are stepped together; matrices first."""
    each = sorted(_single(tables), key=lambda table: table.columns == 1)
    for some in rounds(each, lambda table: table.numel / shards):
        yield [table.shard(shards) for table in some]


def rounded_step(tables: Iterable[Table], shards: int, tp: int, *, states: int, step_bytes: float | None) -> float:
    """Bytes at most of a step of bf16 parameters in float32: a group of them is widened, with its gradients and its
    `states` of 16 bits, then stepped, which takes `step_bytes` for each number of one of them (None: as Adafactor),
    then rounded one after the other, with noise."""
    wide, rounding = 8 + 2 * states, 10  # of a number: noise, its sum with the wide number, and the result
    most = 0.0
    for group in rounds(_single(tables), lambda table: table.numel * tp, most=WIDE_ELEMENTS):
        numels = [table.shard(shards) for table in group]
        left = wide * sum(numels)
        own = adafactor_step(group, shards, narrow=False) if step_bytes is None else step_bytes * max(numels)
        most = max(most, left + own)
        for numel in numels:
            most = max(most, left + rounding * numel)
            left -= wide * numel
    return most


def _single(tables: Iterable[Table]) -> Iterator[Table]:
    """Each parameter as a table by itself."""
    return (replace(some, times=1) for some in tables for _ in range(some.times))

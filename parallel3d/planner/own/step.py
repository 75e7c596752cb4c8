"""What an optimizer keeps and makes where that is not so many bytes for each number: Adafactor, of whose matrices the
means of rows and of columns are kept (`training.optimizers.adafactor`), and which steps a few parameters at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parallel3d.planner.parameters import Table

ROUND_ELEMENTS = 2**25  # of a rank's part, as training.optimizers.split's


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
    each = [table for table in tables for _ in range(table.times)]
    found: list[int] = []
    elements = 0.0
    for table in sorted(each, key=lambda table: table.columns == 1):
        found.append(table.shard(shards) // table.times)
        elements += table.numel / table.times / shards
        if elements >= ROUND_ELEMENTS:
            yield found
            found, elements = [], 0.0
    if found:
        yield found

"""How a dim is cut over the ranks of an axis: the one formula for layers, data ranks, checkpoints
and the planner.

The cut is that of `torch.chunk` and of DTensor's `Shard`: every rank but the last ones has
ceil(size / ranks) rows, and where the division leaves a remainder the last ranks have fewer, or
none. Without torch.
"""

from __future__ import annotations


def shard_rows(size: int, rank: int, ranks: int) -> range:
    """The rows, of `size` in all, that `rank` of `ranks` has; an empty range where it has none."""
    each = largest_shard(size, ranks)
    return range(size)[rank * each : (rank + 1) * each]


def largest_shard(size: int, ranks: int) -> int:
    """The most rows that a rank has, ceil(size / ranks): those of rank 0."""
    return -(-size // ranks)


def divisors(number: int) -> list[int]:
    """The sizes that an axis of `number` ranks can be cut into, in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})

"""Shard sizes of a dim that is split over a mesh axis.

Sizes match `torch.chunk` and DTensor's `Shard`: ceil(size / ranks) rows per rank. If the size is
not divisible, the last ranks have fewer rows or none. Does not import torch.
"""

from __future__ import annotations


def shard_rows(size: int, rank: int, ranks: int) -> range:
    """Returns the range of rows that `rank` holds out of `size` rows. It may be empty."""
    each = largest_shard(size, ranks)
    return range(size)[rank * each : (rank + 1) * each]


def largest_shard(size: int, ranks: int) -> int:
    """Returns ceil(size / ranks), the number of rows that rank 0 holds."""
    return -(-size // ranks)


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number` in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})

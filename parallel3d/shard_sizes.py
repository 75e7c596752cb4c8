"""Shard sizes of a dim that is split over an axis.

Sizes match `torch.chunk` and DTensor's `Shard`: ceil(size / ranks) rows per rank. If the size is
not divisible, the last ranks have fewer rows or none. This module does not import torch.
"""

from __future__ import annotations


def shard_rows(size: int, rank: int, ranks: int) -> range:
    """Returns the rows of `rank` out of `size` rows. The range may be empty."""
    each = largest_shard(size, ranks)
    return range(size)[rank * each : (rank + 1) * each]


def largest_shard(size: int, ranks: int) -> int:
    """Returns ceil(size / ranks), the number of rows of rank 0."""
    return -(-size // ranks)


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number` in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})

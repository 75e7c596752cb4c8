"""The order of samples. Sample i is in epoch i // windows, at a position in the permutation of that
epoch.

The order is a pure function of (seed, i), so a run can resume at any step and in any layout. A
small cipher computes it for one sample at a time. A table for 10^9 windows would take 8 GB in every
process and tens of seconds in every epoch, and `permutation` of numpy may change between versions.

A run that skips samples (`SkippedRanges`) trains on the order without them.

The cipher is the generalized Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite
Domains" (CT-RSA 2002). A window is a cell of a grid with `wide` columns. Each round rotates every
row, or every column, by an amount that is hashed from its index. Each rotation can be undone, so
the result is a bijection. The grid has up to `wide` extra cells. A walk that reaches one of them
continues until it is back among the windows ("cycle walking"). The hash is the output function of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.recipe import SequenceRange

Uint64s = NDArray[np.uint64]

# With 24 rounds, a chi-squared test of 100,000 draws finds all permutations of 2 to 7 windows
# equally likely. With 12 rounds it does not.
ROUNDS = 24


@dataclass(frozen=True)
class SkippedRanges:
    """The samples that a run skips, as ascending ranges with gaps. Sequences 0, 1, 2, ... of the
    run are the other samples in order, in every layout."""

    ranges: tuple[SequenceRange, ...] = ()

    @classmethod
    def merge(cls, ranges: Iterable[SequenceRange]) -> SkippedRanges:
        """Merges ranges in any order. They may overlap."""
        merged: list[SequenceRange] = []
        for each in sorted(ranges, key=lambda each: each.first):
            if merged and each.first <= merged[-1].last + 1:
                before = merged.pop()
                last = max(each.last, before.last)
                each = SequenceRange(first=before.first, last=last)
            merged.append(each)
        return cls(tuple(merged))

    def samples(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sample index of each of the run's `sequences`."""
        samples = sequences.copy()
        for each in self.ranges:
            samples[samples >= each.first] += each.last - each.first + 1
        return samples

    def before(self, sequences: int) -> tuple[SequenceRange, ...]:
        """Returns the ranges before or among the first `sequences` sequences of the run."""
        return tuple(each for each in self.ranges if each.last < self.end(sequences))

    def end(self, sequences: int) -> int:
        """Returns the number of samples up to the last of the first `sequences` sequences, skipped
        ones included."""
        return self.span(0, sequences).last + 1 if sequences else 0

    def span(self, begin: int, end: int) -> SequenceRange:
        """Returns the range of samples from sequence `begin` to the last one before `end`."""
        first, last = self.samples(np.array([begin, end - 1])).tolist()
        return SequenceRange(first=first, last=last)


def window_order(
    samples: NDArray[np.int64], *, windows: int, seed: int | None
) -> NDArray[np.int64]:
    """Returns the window of each sample index in `samples` `[count]`. If `seed` is None, windows
    stay in the order of the corpus.

    An epoch is `windows` consecutive samples and contains every window once."""
    epoch, place = np.divmod(samples, windows)
    if seed is None:
        return place
    seed_key = _hash(np.full_like(epoch, seed % 2**64, dtype=np.uint64))
    epoch_key = _hash(seed_key ^ epoch.astype(np.uint64))
    place = place.astype(np.uint64)
    wide = math.isqrt(windows - 1) + 1
    wide += wide % 2  # If both sizes were odd, the rotations would never give an odd permutation.
    tall = -(-windows // wide)
    place = _turn(place, epoch_key, wide, tall)
    outside = place >= windows
    while outside.any():
        place[outside] = _turn(place[outside], epoch_key[outside], wide, tall)
        outside = place >= windows
    return place.astype(np.int64)


def _turn(cell: Uint64s, key: Uint64s, wide: int, tall: int) -> Uint64s:
    """Maps each cell of the `wide` x `tall` grid to a cell, as a bijection for each key."""
    row, column = np.divmod(cell, wide)
    for _ in range(ROUNDS // 2):
        key = _hash(key)
        turn = _hash(key ^ row) % wide
        column = (column + turn) % wide
        key = _hash(key)
        turn = _hash(key ^ column) % tall
        row = (row + turn) % tall
    return row * wide + column


def _hash(x: Uint64s) -> Uint64s:
    """Returns the next output of SplitMix64 from state `x`, modulo 2^64."""
    x = x + 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio.
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x

"""The order of samples: sample i lies in epoch i // windows, at a place of that epoch's permutation
of the windows.

The order is a pure function of (seed, i), so a run resumes at any step and in any layout by
arithmetic. A small cipher computes it a sample at a time: a table for 10^9 windows would be 8 GB in
every process and tens of seconds at every epoch, and numpy's `permutation` may change with its
version.

A run that skips samples (`SkippedRanges`) trains on the order without them.

The cipher is the generalized Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite
Domains" (CT-RSA 2002): a window is a cell of a grid of `wide` columns; each round turns every row,
or every column, by an amount that is hashed from the row's (column's) number, which can be undone,
so the whole is a bijection. A grid has up to `wide` cells too many; a walk that meets one of those
goes on until it is back among the windows ("cycle walking"). The hash is the output function of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.recipe import SequenceRange

Uint64s = NDArray[np.uint64]

# all permutations of 2 to 7 windows are then equally likely by a chi-squared test of 100,000 (12:
# not yet)
ROUNDS = 24


@dataclass(frozen=True)
class SkippedRanges:
    """The samples that a run skips, as ranges that ascend and do not touch. The sequences 0, 1, 2,
    ... of the run are the other samples in their order, whatever the layout."""

    ranges: tuple[SequenceRange, ...] = ()

    @classmethod
    def merge(cls, ranges: Iterable[SequenceRange]) -> SkippedRanges:
        """Merges ranges in any order, which may overlap."""
        merged: list[SequenceRange] = []
        for each in sorted(ranges, key=lambda each: each.first):
            if merged and each.first <= merged[-1].last + 1:
                before = merged.pop()
                last = max(each.last, before.last)
                each = SequenceRange(first=before.first, last=last)
            merged.append(each)
        return cls(tuple(merged))

    def samples(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sample that each of the run's `sequences` is."""
        samples = sequences.copy()
        for each in self.ranges:
            samples[samples >= each.first] += each.last - each.first + 1
        return samples

    def before(self, sequences: int) -> tuple[SequenceRange, ...]:
        """Returns the ranges before or among the first `sequences` sequences of the run."""
        return tuple(each for each in self.ranges if each.last < self.end(sequences))

    def end(self, sequences: int) -> int:
        """Returns the number of samples up to the last of the first `sequences` sequences, with
        those skipped."""
        return self.span(0, sequences).last + 1 if sequences else 0

    def span(self, begin: int, end: int) -> SequenceRange:
        """Returns the samples from the run's sequence `begin` to the last one before `end`."""
        first, last = self.samples(np.array([begin, end - 1])).tolist()
        return SequenceRange(first=first, last=last)


def window_order(
    samples: NDArray[np.int64], *, windows: int, seed: int | None
) -> NDArray[np.int64]:
    """Returns the window of each of `samples` (global indices, `[count]`); where `seed` is None, in
    the corpus's order. Each epoch (`windows` consecutive samples from a multiple of `windows`)
    holds every window once."""
    epoch, place = np.divmod(samples, windows)
    if seed is None:
        return place
    seed_key = _hash(np.full_like(epoch, seed % 2**64, dtype=np.uint64))
    epoch_key = _hash(seed_key ^ epoch.astype(np.uint64))
    place = place.astype(np.uint64)
    wide = math.isqrt(windows - 1) + 1
    wide += wide % 2  # turns of odd rows and columns only would never give an odd permutation
    tall = -(-windows // wide)
    place = _turn(place, epoch_key, wide, tall)
    outside = place >= windows
    while outside.any():
        place[outside] = _turn(place[outside], epoch_key[outside], wide, tall)
        outside = place >= windows
    return place.astype(np.int64)


def _turn(cell: Uint64s, key: Uint64s, wide: int, tall: int) -> Uint64s:
    """Maps each cell of the `wide` x `tall` grid to another one, a bijection for each key."""
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
    """Returns SplitMix64's next output from state `x`; products wrap around 2^64."""
    x = x + 0x9E3779B97F4A7C15  # 2^64 / golden ratio
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x

"""Shuffles windows: maps each sample index of a run to a window.

Each epoch is a permutation of all windows. The window of a sample is a pure function of the seed
and the sample index, so a run can resume at any step and in any layout. A small cipher computes it.
A table for 10^9 windows would take 8 GB in every process, and numpy's `permutation` may change
between versions.

A run that skips samples (`SkippedRanges`) trains on the remaining samples in the same order.

The cipher is the generalized Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite
Domains" (CT-RSA 2002). A window is a cell of a grid with `wide` columns. Rounds alternately rotate
every row and every column by a hash of its index and the key. Each rotation can be undone, so the
result is a bijection. The grid has fewer than `wide` cells more than there are windows. If the
cipher returns one of these, it is applied again until it returns a window ("cycle walking"). The
hash is the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.recipe import SequenceRange

Uint64s = NDArray[np.uint64]

# Number of rotations in the cipher. With 24, a chi-squared test of 100,000 draws accepts that all
# permutations of 2 to 7 windows are equally likely. With 12 it rejects that.
ROUNDS = 24


@dataclass(frozen=True)
class SkippedRanges:
    """The samples that a run skips, as ascending ranges that neither overlap nor touch. Sequences
    0, 1, 2, ... of the run are the remaining samples in order."""

    ranges: tuple[SequenceRange, ...] = ()

    @classmethod
    def merge(cls, ranges: Iterable[SequenceRange]) -> SkippedRanges:
        """Builds the object from ranges in any order, which may overlap."""
        merged: list[SequenceRange] = []
        for each in sorted(ranges, key=lambda each: each.first):
            if merged and each.first <= merged[-1].last + 1:
                before = merged.pop()
                last = max(each.last, before.last)
                each = SequenceRange(first=before.first, last=last)
            merged.append(each)
        return cls(tuple(merged))

    def samples(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sample index of each sequence index in `sequences`."""
        samples = sequences.copy()
        for each in self.ranges:
            samples[samples >= each.first] += each.last - each.first + 1
        return samples

    def before(self, sequences: int) -> tuple[SequenceRange, ...]:
        """Returns the ranges that are skipped within the first `sequences` sequences."""
        return tuple(each for each in self.ranges if each.last < self.end(sequences))

    def end(self, sequences: int) -> int:
        """Returns the number of samples that the first `sequences` sequences span, including
        skipped ones."""
        return self.span(0, sequences).last + 1 if sequences else 0

    def span(self, begin: int, end: int) -> SequenceRange:
        """Returns the range of samples from sequence `begin` through sequence `end` - 1."""
        first, last = self.samples(np.array([begin, end - 1])).tolist()
        return SequenceRange(first=first, last=last)


def window_order(
    samples: NDArray[np.int64], *, windows: int, seed: int | None
) -> NDArray[np.int64]:
    """Returns the window of each sample index in `samples` `[count]`. If `seed` is None, windows
    are not shuffled.

    An epoch is `windows` consecutive samples. It contains every window once."""
    epoch, place = np.divmod(samples, windows)
    if seed is None:
        return place
    seed_key = _hash(np.full_like(epoch, seed % 2**64, dtype=np.uint64))
    epoch_key = _hash(seed_key ^ epoch.astype(np.uint64))
    place = place.astype(np.uint64)
    wide = math.isqrt(windows - 1) + 1
    wide += wide % 2  # If both sides were odd, rotations would only yield even permutations.
    tall = -(-windows // wide)
    place = _turn(place, epoch_key, wide, tall)
    outside = place >= windows
    while outside.any():
        place[outside] = _turn(place[outside], epoch_key[outside], wide, tall)
        outside = place >= windows
    return place.astype(np.int64)


def _turn(cell: Uint64s, key: Uint64s, wide: int, tall: int) -> Uint64s:
    """Applies the cipher to cells of a `wide` x `tall` grid. For each key it is a bijection."""
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
    """Returns the next output of SplitMix64 from state `x`."""
    x = x + 0x9E3779B97F4A7C15  # 2^64 / golden ratio
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x

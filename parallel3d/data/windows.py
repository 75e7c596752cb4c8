"""Streams of token IDs, and their windows in the order of a run's samples.

A window is `seq_len + 1` tokens at stride `seq_len`. Its first `seq_len` tokens are the inputs, and
its last `seq_len` tokens are the labels."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from parallel3d.data.order import window_order

TokenIds = NDArray[np.integer]  # uint16, or uint32 for large vocabularies.


class TokenStream(Protocol):
    """Token IDs of consecutive documents, with random access."""

    def __len__(self) -> int:
        """Returns the number of tokens."""
        ...

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[starts, length]`."""
        ...


class WindowSource(Protocol):
    """Windows from which a loader draws sequences."""

    @property
    def windows(self) -> int:
        """Number of windows in one epoch."""
        ...

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        """Returns the windows `[samples, seq_len + 1]` of samples, given by their indices in the
        run. The result does not depend on earlier calls."""
        ...


@dataclass(frozen=True, eq=False)
class TokensInMemory:
    """A stream of token IDs in memory."""

    ids: TokenIds

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[starts, length]`."""
        every_run: TokenIds = sliding_window_view(self.ids, length)  # A view, without a copy.
        return every_run[starts]


@dataclass(frozen=True, eq=False)
class ShuffledWindows:
    """The windows of one stream, each once per epoch, shuffled by `seed`, or in order if it is
    None. The stream must have at least one window."""

    stream: TokenStream
    _: KW_ONLY
    seq_len: int
    seed: int | None

    @property
    def windows(self) -> int:
        """Number of windows in one epoch."""
        return (len(self.stream) - 1) // self.seq_len

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        """Returns the windows `[samples, seq_len + 1]` of samples, given by their indices in the
        run."""
        windows = window_order(samples, windows=self.windows, seed=self.seed)
        return self.stream.read(windows * self.seq_len, self.seq_len + 1)

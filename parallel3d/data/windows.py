"""A stream of token ids, and its windows in the order of a run's samples: what a loader draws its
sequences from.

A window is `seq_len + 1` tokens at stride `seq_len`: the inputs are its first `seq_len` tokens, the
labels its last.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from parallel3d.data.order import window_order

TokenIds = NDArray[np.integer]  # uint16, or uint32 where a vocabulary needs it


class TokenStream(Protocol):
    """Token ids, one document after the other, of which any run can be read."""

    def __len__(self) -> int:
        """Returns the number of tokens."""
        ...

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[starts, length]`."""
        ...


class WindowSource(Protocol):
    """What a loader draws its sequences from."""

    @property
    def windows(self) -> int:
        """The number of windows in one epoch."""
        ...

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        """Returns the windows `[samples, seq_len + 1]` of samples by their numbers in the run's
        global order. It is a function of the numbers alone, whatever was drawn before."""
        ...


@dataclass(frozen=True, eq=False)
class TokensInMemory:
    """A stream of ids that the process holds in memory."""

    ids: TokenIds

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[starts, length]`."""
        every_run: TokenIds = sliding_window_view(self.ids, length)  # a view: nothing is copied
        return every_run[starts]


@dataclass(frozen=True, eq=False)
class ShuffledWindows:
    """The windows of one stream, each once an epoch, shuffled by `seed` (None: in the stream's
    order). Past the last window the samples go on with the next epoch. The stream is no shorter
    than one window."""

    stream: TokenStream
    _: KW_ONLY
    seq_len: int
    seed: int | None

    @property
    def windows(self) -> int:
        """The number of windows in one epoch."""
        return (len(self.stream) - 1) // self.seq_len

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        """Returns the windows `[samples, seq_len + 1]` of samples by their numbers in the run's
        global order."""
        windows = window_order(samples, windows=self.windows, seed=self.seed)
        return self.stream.read(windows * self.seq_len, self.seq_len + 1)

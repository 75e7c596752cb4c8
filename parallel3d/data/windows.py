"""Streams of token IDs, and sources that draw windows from them.

A window is `seq_len + 1` consecutive tokens. Windows start every `seq_len` tokens, so neighbors
share one token. The first `seq_len` tokens are the inputs, the last `seq_len` are the labels."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from parallel3d.data.order import window_order

TokenIds = NDArray[np.integer]  # uint16 or uint32, or another integer type in Megatron's files


class TokenStream(Protocol):
    """Token IDs of consecutive documents, with random access."""

    def __len__(self) -> int:
        """Returns the number of tokens."""
        ...

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[len(starts), length]`."""
        ...


class WindowSource(Protocol):
    """Source from which a loader draws windows by sample index."""

    @property
    def windows(self) -> int:
        """Number of windows in one epoch."""
        ...

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        """Returns the windows `[len(samples), seq_len + 1]` for sample indices of the run. The
        result does not depend on earlier calls."""
        ...


@dataclass(frozen=True, eq=False)
class TokensInMemory:
    """A stream of token IDs in memory."""

    ids: TokenIds

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[len(starts), length]`."""
        every_run: TokenIds = sliding_window_view(self.ids, length)  # Does not copy.
        return every_run[starts]


@dataclass(frozen=True, eq=False)
class ShuffledWindows:
    """The windows of one stream, each once per epoch. They are shuffled by `seed`, or stay in order
    if it is None. The stream must have at least one window."""

    stream: TokenStream
    _: KW_ONLY
    seq_len: int
    seed: int | None

    @property
    def windows(self) -> int:
        """Number of windows in one epoch."""
        return (len(self.stream) - 1) // self.seq_len

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        """Returns the windows `[len(samples), seq_len + 1]` for sample indices of the run."""
        windows = window_order(samples, windows=self.windows, seed=self.seed)
        return self.stream.read(windows * self.seq_len, self.seq_len + 1)

"""A run's clock: the time that its steps take, and what that makes in tokens and FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Adds up the blocks that it times, until it is read: steps, but not validation or checkpoints."""

    _seconds: float = field(default=0.0, init=False)
    _blocks: int = field(default=0, init=False)

    @contextmanager
    def timing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
        self._blocks += 1

    def read(self) -> tuple[float, int]:
        """Seconds and blocks since the last reading."""
        read = self._seconds, self._blocks
        self._seconds, self._blocks = 0.0, 0
        return read

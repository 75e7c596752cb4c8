"""A run that is asked to end, because its time limit nears or its machine is taken back: SIGTERM to any of its workers.
All ranks then end after the same step, on which they agree by the sum over the mesh that each step makes anyway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Of this process."""

    is_made: bool = False


@contextmanager
def heeding_sigterm() -> Iterator[StopRequest]:
    """From here to the end of the block SIGTERM is a request. In the main thread; another one hears no signals."""
    request = StopRequest()

    def hear(signum: int, frame: FrameType | None) -> None:
        request.is_made = True

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)

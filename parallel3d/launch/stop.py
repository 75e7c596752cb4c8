"""SIGTERM as a request to end the run, because its time limit nears or its machine is taken back. Each training step
sums the requests over the mesh, so a signal to any one worker ends all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Set by SIGTERM in this process; polled once a step."""

    is_made: bool = False


@contextmanager
def catch_sigterm() -> Iterator[StopRequest]:
    """Turns SIGTERM into a request, from here to the end of the block. Python delivers signals to the main thread only,
    so in another thread the request is never made."""
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

"""SIGTERM as a request to end the run, because its time limit nears or its machine is taken back. Each training step
sums the requests over the mesh, so a signal to any one worker ends all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Set by SIGTERM in this process; polled once a step."""

    is_made: bool = False


@contextmanager
def catch_sigterm() -> Iterator[StopRequest]:
    """Turns SIGTERM into a request, from here to the end of the block; in another thread than the main one never."""
    request = StopRequest()

    def hear(signum: int, frame: FrameType | None) -> None:
        request.is_made = True

    with handled([signal.SIGTERM], hear):
        yield request


def ignore_sigterm() -> None:
    """Lets this process, which has failed, say so to the end: a launcher that sees a peer end sends SIGTERM to all."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def handled(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Has `handler` handle these signals to the end of the block. Python delivers signals to the main thread only, so
    in another thread nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, handler) for signum in (signals if is_main else ())}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)

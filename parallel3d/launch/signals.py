"""SIGTERM (a time limit nears, a machine is taken back) and SIGINT (Ctrl-C) as requests to end the run. Each training
step sums the requests over the mesh, so a signal to any one worker ends all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """Set by a signal in this process; polled once a step. Launchers may send a signal again, so a further one changes
    nothing: what ends a run at once at a second Ctrl-C is its launcher."""

    signum: int = 0  # the last signal's number; 0 before any

    @property
    def is_made(self) -> bool:
        return self.signum != 0


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Turns the signals that ask for an end into a request, from here to the end of the block; in another thread than
    the main one never. A signal that this process ignores, as nohup or a shell's & has it, stays ignored."""
    request = StopRequest()

    def hear(signum: int, frame: FrameType | None) -> None:
        request.signum = signum

    with handled([each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN], hear):
        yield request


def ignore_stop_signals() -> None:
    """Lets this process, which has failed, say so to the end: a launcher that sees a peer end sends SIGTERM to all."""
    if threading.current_thread() is threading.main_thread():
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)


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

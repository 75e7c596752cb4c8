"""Signals as requests to a run: SIGTERM (a time limit nears, a machine is taken back), SIGHUP (its
terminal has gone) and SIGINT (Ctrl-C) ask it to save and end, SIGUSR1 to save and go on. Each
training step sums the requests over the mesh, so a signal to any one worker counts for all ranks
after the same step."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
LAUNCHER_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL)  # what a launcher passes on to its workers


def signal_name(signum: int) -> str:
    """Returns what people call a signal."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


@dataclass
class StopRequest:
    """Set by signals in this process; polled once a step. Launchers may send a signal again, so a
    further one changes nothing: what ends a run at once at a second Ctrl-C is its launcher."""

    signum: int = 0  # the signal that asks for an end; 0 before any
    wants_save: bool = False  # SIGUSR1 has come since the last save that answered it

    def is_answered(self) -> None:
        """Ends the time of `checkpoint.grace_s`: what was asked for is saved."""
        if self.signum:
            signal.setitimer(signal.ITIMER_REAL, 0)


def heeded_stop_signals() -> list[signal.Signals]:
    """Returns the stop signals that this process does not ignore, as nohup and a shell's & have it
    on purpose."""
    return [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def catch_stop_signals(
    grace_s: float | None, too_late: Callable[[int], Exception]
) -> Iterator[StopRequest]:
    """Turns the signals into a request, from here to the end of the block; in another thread than
    the main one never. A signal that this process ignores stays ignored.

    Where `grace_s` after the first signal that asks for an end the request is not answered, what
    `too_late` makes of the signal is raised in the main thread."""
    request = StopRequest()

    def hear(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGALRM:
            raise too_late(request.signum)
        if signum == SAVE_SIGNAL:
            request.wants_save = True
            return
        if grace_s is not None and not request.signum:
            signal.setitimer(signal.ITIMER_REAL, grace_s)
        request.signum = signum

    caught = [*heeded_stop_signals(), SAVE_SIGNAL]
    if grace_s is not None:
        caught.append(signal.SIGALRM)
    with handled(caught, hear):
        try:
            yield request
        finally:
            request.is_answered()


def ignore_stop_signals() -> None:
    """Lets this process, which has failed, say so to the end: a launcher that sees a peer end sends
    SIGTERM to all."""
    if threading.current_thread() is threading.main_thread():
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)


@contextmanager
def handled(
    signals: Iterable[signal.Signals],
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Has `handler` handle these signals to the end of the block. Python delivers signals to the
    main thread only, so in another thread nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, handler) for signum in (signals if is_main else ())}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def die_with_the_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if this process is stopped."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the kernel knew
            os.kill(os.getpid(), signal.SIGKILL)

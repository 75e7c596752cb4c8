"""Turns signals into requests to the training loop.

SIGTERM (a time limit or preemption), SIGHUP (the terminal was closed) and SIGINT (Ctrl-C) ask the
run to save and end. SIGUSR1 asks it to save and continue. Each training step sums the requests over
the mesh, so a signal to a single worker takes effect on all ranks after the same step."""

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
LAUNCHER_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL)  # Signals that a launcher forwards to its workers.


def signal_name(signum: int) -> str:
    """Returns the name of a signal, "Ctrl-C" for SIGINT."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


@dataclass
class StopRequest:
    """Requests that signals set and the training loop polls once per step. Repeated stop signals
    have no further effect here: the launcher handles a second Ctrl-C."""

    signum: int = 0  # Last stop signal received, or 0.
    wants_save: bool = False  # True if SIGUSR1 was received since the last save.

    def is_answered(self) -> None:
        """Stops the timer of `checkpoint.grace_s`. Call it after the requested save."""
        if self.signum:
            signal.setitimer(signal.ITIMER_REAL, 0)


def heeded_stop_signals() -> list[signal.Signals]:
    """Returns the stop signals that this process does not ignore. nohup, or `&` in a shell, makes
    it ignore some on purpose."""
    return [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def catch_stop_signals(
    grace_s: float | None, too_late: Callable[[int], Exception]
) -> Iterator[StopRequest]:
    """Context manager that yields a StopRequest, in which stop signals and SIGUSR1 are recorded.

    Works only in the main thread. Ignored stop signals stay ignored. If `is_answered` is not called
    within `grace_s` seconds (None: no limit) after the first stop signal, the exception
    `too_late(signum)` is raised."""
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
    """In the main thread, ignores stop signals so that a failed process can finish its report. A
    launcher sends SIGTERM to all ranks when one ends."""
    if threading.current_thread() is threading.main_thread():
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)


@contextmanager
def handled(
    signals: Iterable[signal.Signals],
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Context manager that installs `handler` for `signals`. It does nothing outside the main
    thread, because Python runs signal handlers only there."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, handler) for signum in (signals if is_main else ())}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def die_with_the_parent() -> None:
    """On Linux, makes the kernel kill this process when its parent ends, even if it is stopped."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent ended before the call.
            os.kill(os.getpid(), signal.SIGKILL)

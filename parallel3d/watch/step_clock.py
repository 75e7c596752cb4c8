"""Measures where the time of training steps goes, by cause.

Code that begins another kind of work says so with `timed`. The time in between belongs to the
innermost cause, so all causes together make up the time of the step. On a GPU, CUDA events mark the
times on the current stream, and `settle` reads those that have passed, without waiting.

This module must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, get_args

Cause = Literal[
    "compute",
    "recompute",
    "tp",  # Collectives of tensor parallelism, with the wait for slower ranks.
    "cp",
    "ep",
    "pp_bubble",  # Waits for messages and results of other pipeline ranks.
    "pp_p2p",  # Sends, and receives of messages that have arrived.
    "dp",  # Exposed communication of data parallelism. The rest overlaps with computation.
    "optimizer",  # Includes gradient norm and clipping.
    "data",  # Waits for the next batch.
    "checkpoint",  # Saves, as far as training waits for them.
    "other",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
# Causes whose time a rank spends at least in part on waiting for other ranks.
WAITS: tuple[Cause, ...] = ("tp", "cp", "ep", "pp_bubble", "dp")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Events(Protocol):
    """Events in the current stream of a GPU."""

    def record(self) -> Any:
        """Returns an event that passes when the GPU has done the work before it."""

    def has_passed(self, event: Any) -> bool:
        """Returns True if the GPU has reached the event, without waiting."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Returns the seconds between two events that have passed."""


class StepClock:
    """Seconds by cause on this rank. `CLOCK` is the only instance.

    It runs within `running`. One thread at a time changes the cause: the main thread or, on a GPU,
    the thread of autograd, for which the main thread waits.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.cause: Cause | None = None  # None: the clock does not run.
        self._since_s = 0.0  # Time of the last switch on a CPU.
        self._events: Events | None = None
        # The cause that ended at each event, and the event. None: the clock did not run before it.
        self._marks: list[tuple[Cause | None, Any]] = []

    def use(self, events: Events) -> None:
        """Measures with events of a GPU from now on."""
        self._events = events

    def switch(self, cause: Cause | None) -> Cause | None:
        """Begins a cause and returns the one that ended."""
        before = self.cause
        self.cause = cause
        if self._events is not None:
            self._marks.append((before, self._events.record()))
            return before
        now_s = time.perf_counter()
        if before is not None:
            self.seconds[before] += now_s - self._since_s
        self._since_s = now_s
        return before

    @contextmanager
    def running(self, cause: Cause = "other") -> Iterator[None]:
        """Context manager in which the clock runs. Time without another cause goes to `cause`."""
        before = self.switch(cause)
        try:
            yield
        finally:
            self.switch(before)

    def settle(self) -> None:
        """Adds up the time until the last event that has passed. Does nothing on a CPU."""
        if self._events is None:
            return
        count = 0
        for (_, start), (cause, end) in pairwise(self._marks):
            if not self._events.has_passed(end):
                break
            count += 1
            if cause is not None:
                self.seconds[cause] += self._events.elapsed_s(start, end)
        del self._marks[:count]

    def take(self) -> dict[Cause, float]:
        """Returns the seconds by cause since the last call."""
        self.settle()
        taken, self.seconds = self.seconds, dict.fromkeys(CAUSES, 0.0)
        return taken


CLOCK = StepClock()


class timed:  # noqa: N801  # used like a function
    """Context manager whose time belongs to a cause. Does nothing if the clock does not run."""

    __slots__ = ("_before", "_cause")

    def __init__(self, cause: Cause) -> None:
        self._cause = cause

    def __enter__(self) -> None:
        self._before = None if CLOCK.cause is None else CLOCK.switch(self._cause)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            CLOCK.switch(self._before)


def timed_as(cause: Cause) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorator for functions whose time belongs to a cause."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def timed_function(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with timed(cause):
                return function(*args, **kwargs)

        return timed_function

    return decorate

"""Heartbeats of a rank.

The main thread reports its activity with `phase` and `step_done`. Another thread sends a `Beat`
twice a second.

Modules whose functions wait for other ranks set `WAITS_FOR_RANKS = True`. A rank counts as waiting
if the innermost frame of parallel3d or torch is in such a module, in torch.distributed or in
torch.autograd. (On a GPU, other threads run the backward pass and the main thread waits for them.)
This module must not import torch.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

BEAT_S = 0.5  # Seconds between two heartbeats.
_MOST_FRAMES = 4  # Maximum number of stack frames in a message.
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Content of a heartbeat."""

    count: int
    step: int  # Last completed step.
    # Median seconds per recent step. None before this process has completed two steps.
    step_s: float | None
    phase: str
    waits: bool  # True if the rank waits for other ranks.
    stack: str  # Innermost stack frames, innermost first.

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def activity(self) -> tuple[int, bool, str]:
        """State that changes when the rank makes progress."""
        return self.step, self.waits, self.phase

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        return cls(**json.loads(text))


@dataclass
class Heartbeat:
    """State that the heartbeats of this process report. `HEARTBEAT` is the only instance."""

    phases: list[tuple[str, bool]] = field(default_factory=lambda: [("other", False)])
    step: int = 0
    count: int = 0
    # End times of recent steps.
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    def beat(self) -> Beat:
        """Returns the next heartbeat of the main thread."""
        name, waits = self.phases[-1]
        # Up to Python 3.11, a garbage collection while a frame object is created can release the
        # GIL. If the main thread then returns from that frame, the object refers to freed memory.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            compiles, waits_inside, stack = _inspect_main_thread()
        finally:
            if was_enabled:
                gc.enable()
        self.count += 1
        durations = [after - before for before, after in pairwise(list(self.ends))]
        return Beat(
            count=self.count,
            step=self.step,
            step_s=statistics.median(durations) if durations else None,
            phase="compilation" if compiles else name,
            waits=waits or waits_inside,
            stack=stack,
        )


HEARTBEAT = Heartbeat()


@contextmanager
def phase(name: str, *, waits: bool = False) -> Iterator[None]:
    """Context manager that reports the main thread's activity. Does nothing in other threads.

    Set `waits` if the code inside the `with` block only waits for other ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    HEARTBEAT.phases.append((name, waits))
    try:
        yield
    finally:
        HEARTBEAT.phases.pop()


def step_done(step: int) -> None:
    """Reports a completed step."""
    HEARTBEAT.step = step
    HEARTBEAT.ends.append(time.monotonic())


def _inspect_main_thread() -> tuple[bool, bool, str]:
    """Returns (is compiling, waits for ranks, innermost frames) of the main thread."""
    compiles = False
    waits = None
    words = list[str]()
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    for frame, line in traceback.walk_stack(innermost):
        module = str(frame.f_globals.get("__name__", ""))
        path = frame.f_code.co_filename
        compiles = compiles or module in _COMPILERS
        if waits is None and frame.f_globals.get("WAITS_FOR_RANKS"):
            waits = True
        elif waits is None and module.startswith(("torch.", "parallel3d.")):
            waits = module.startswith(("torch.distributed.", "torch.autograd."))
        if not words or "/lib/python" not in path:
            words.append(f"{os.path.basename(path)}:{line} ({frame.f_code.co_name})")
    return compiles, bool(waits), " < ".join(words[:_MOST_FRAMES])


@contextmanager
def beats_to_file(file: Path) -> Iterator[None]:
    """Context manager that writes heartbeats from a thread to a file, which the launcher reads."""
    is_over = threading.Event()
    partial = file.with_suffix(".partial")

    def write_beats() -> None:
        is_last = False
        with suppress(OSError):  # If the launcher has ended, its folder is gone.
            while not is_last:
                is_last = is_over.wait(BEAT_S)
                partial.write_text(HEARTBEAT.beat().to_json())
                partial.replace(file)

    thread = threading.Thread(target=write_beats, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

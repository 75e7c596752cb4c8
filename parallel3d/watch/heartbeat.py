"""Signs of life of a rank.

The code says by `phase` what the rank is doing, and by `step_done` that a step has ended. A thread
sends a `Beat` of this twice a second. A module whose functions wait for other ranks has
`WAITS_FOR_RANKS = True`: a rank waits if the innermost frame of this package or of torch is in such
a module, in torch.distributed or in torch.autograd. (On a GPU other threads run the backward pass,
and the main thread waits for them.) No torch here.
"""

from __future__ import annotations

import gc
import json
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
from types import FrameType

BEAT_S = 0.5  # between two beats
_MOST_FRAMES = 4  # in a message
_LOADER_THREADS = "next_batch"  # their names begin with it
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A sign of life. `count` grows with each."""

    count: int
    step: int  # completed steps
    step_s: float | None  # median of recent steps; None before this process has completed two
    phase: str
    waits: bool  # for other ranks
    stack: str  # the innermost frames, the innermost first

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat | None:
        """Reads a beat. Returns None for one that is only half written."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass
class Heartbeat:
    """The state of this process that its beats show. `HEARTBEAT` is the only one of a run."""

    phases: list[tuple[str, bool]] = field(default_factory=list)  # the innermost last
    step: int = 0
    count: int = 0
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=16))  # of recent steps

    def beat(self, known_phase: str | None = None) -> Beat:
        """Returns the state of the main thread. `known_phase` replaces its phase."""
        name, waits = self.phases[-1] if self.phases else ("other", False)
        try:
            compiles, waits_inside, stack = _inspect_threads(name)
        except Exception as error:  # a run without beats would be taken for a hanging one
            name, compiles, waits_inside, stack = "other", False, False, f"unreadable: {error!r}"
        self.count += 1
        ends = list(self.ends)
        durations = [after - before for before, after in pairwise(ends)]
        return Beat(
            count=self.count,
            step=self.step,
            step_s=statistics.median(durations) if durations else None,
            phase=known_phase or ("compilation" if compiles else name),
            waits=waits or waits_inside,
            stack=stack,
        )


HEARTBEAT = Heartbeat()


@contextmanager
def phase(name: str, *, waits: bool = False) -> Iterator[None]:
    """Says what the main thread does in this block, and whether it only waits for other ranks. Does
    nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    HEARTBEAT.phases.append((name, waits))
    try:
        yield
    finally:
        HEARTBEAT.phases.pop()


def step_done(step: int) -> None:
    """Says that this process has completed a step."""
    HEARTBEAT.step = step
    HEARTBEAT.ends.append(time.monotonic())


def _inspect_threads(phase: str) -> tuple[bool, bool, str]:
    """Returns whether the main thread compiles, whether it waits for ranks, and its innermost
    frames. While it waits for a batch, the frames of the data loader's thread follow."""
    with _no_garbage_collection():
        frames = sys._current_frames()
        main = frames[threading.main_thread().ident or 0]
        stacks = [_frames_in_words(main)]
        for thread in threading.enumerate():
            is_loader = phase == "data" and thread.name.startswith(_LOADER_THREADS)
            if is_loader and thread.ident in frames:
                stacks.append(_frames_in_words(frames[thread.ident]))
        modules = [_module_of(frame) for frame, _ in traceback.walk_stack(main)]
        compiles = any(module in _COMPILERS for module in modules)
        return compiles, _waits_for_ranks(main), "; the loader ".join(stacks)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection while frames of other threads are read.

    Up to Python 3.11, a collection while a frame object is made may release the interpreter. Then
    the other thread returns from that frame, and the object refers to reused memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _waits_for_ranks(main: FrameType) -> bool:
    for frame, _ in traceback.walk_stack(main):
        module = _module_of(frame)
        if frame.f_globals.get("WAITS_FOR_RANKS"):
            return True
        if module.startswith(("torch.", "parallel3d.")):
            return module.startswith(("torch.distributed.", "torch.autograd."))
    return False


def _frames_in_words(innermost: FrameType) -> str:
    words: list[str] = []
    for frame, line in traceback.walk_stack(innermost):
        path = Path(frame.f_code.co_filename)
        if not words or "/lib/python" not in str(path):
            words.append(f"{path.name}:{line} ({frame.f_code.co_name})")
    return " < ".join(words[:_MOST_FRAMES])


def beat_file(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's newest beat, which the launcher on the same host reads."""
    return folder / f"beat_{rank}"


@contextmanager
def beats_to_file(path: Path) -> Iterator[None]:
    """Has a thread write this rank's beats to a file."""
    is_over = threading.Event()

    def write_beats() -> None:
        with suppress(OSError):  # the launcher has ended, and its folder is gone
            while not is_over.wait(BEAT_S):
                path.write_text(HEARTBEAT.beat().to_json())
            path.write_text(HEARTBEAT.beat("done").to_json())

    thread = threading.Thread(target=write_beats, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

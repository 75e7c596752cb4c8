"""What a rank shows of itself about twice a second, from a thread of its own: a beat, with the steps that it has done,
what its main thread is doing, and where. Nothing in the step is told for it: the thread looks at the main thread's
stack, so that a run pays for two looks a second and for nothing else. No torch here."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import parallel3d

BEAT_S = 0.5  # between two beats
_MOST_FRAMES = 4  # of a stack that is told
_PACKAGE = str(Path(parallel3d.__file__).parent) + "/"
# Where the innermost frames of a rank are that waits for others: in this package, and in torch.
_WAITING = (
    "layers/collectives.py",
    "host_memory/",
    "pipeline/transport.py",
    "pipeline/links.py",
    "sharding/exchange.py",
    "checkpoint/together.py",
)
# Also a backward: with a GPU other threads carry it out, and the main one waits for them, as they do for other ranks.
_OF_TORCH = ("/torch/distributed/", "/torch/autograd/")
_READING = ("training/trainer.py", "_result")  # where the host waits for a GPU, and so for what others send to it
# What a rank is doing, by a file or a function of this package among its frames; the first that is found.
_PHASES = (
    ("checkpoint/", "save"),
    ("export.py", "export"),
    ("callbacks.py", "callback"),
    ("reporting/", "metrics"),
    ("evaluate_all", "evaluation"),
    ("generation.py", "generation"),
    ("data/", "data"),
    ("optimizers/", "optimizer"),
    ("training/update.py", "optimizer"),
    ("train_step", "forward or backward"),
)
# What is on the stack while torch compiles. Other files of both packages are there in eager steps, too.
_COMPILING = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A sign of a rank's life. `count` grows with each; `waits` says that the rank waits for others."""

    count: int
    step: int  # steps done
    step_s: float | None  # the median of the last steps' seconds; None before the second step of this process is done
    phase: str
    waits: bool
    stack: str  # the innermost frames, the innermost first

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> Beat | None:
        """Reads a beat; None where it is cut short, as one that is just being written may be."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


class Pulse:
    """Makes the beats of this process. `step_done` is called after each step; all else is seen from outside."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._count, self._step = 0, 0
        self._ends: deque[float] = deque(maxlen=16)

    def step_done(self, step: int) -> None:
        self._step = step
        self._ends.append(time.monotonic())

    def beat(self, known_phase: str | None = None) -> Beat:
        """Returns what the main thread is doing now; `known_phase` says it better where it is given."""
        ends = list(self._ends)
        try:
            phase, waits, stack = self._look()
        except Exception as unseen:  # whatever a wrong look finds, a watch without beats would end a healthy run
            phase, waits, stack = "other", False, f"not to be seen: {unseen!r}"
        self._count += 1
        return Beat(
            count=self._count,
            step=self._step,
            step_s=statistics.median(after - before for before, after in zip(ends, ends[1:], strict=False))
            if len(ends) > 1
            else None,
            phase=known_phase or phase,
            waits=waits,
            stack=stack,
        )

    def _look(self) -> tuple[str, bool, str]:
        """Returns `look_at` for the main thread; where it waits for a batch, with what the loader's threads are at."""
        with _garbage_stays():
            frames = sys._current_frames()
            phase, waits, stack = look_at(frames.get(self._main or 0))
            if phase == "data":  # a batch comes from a thread of the loader's, which knows where it is stuck
                own = threading.get_ident()
                others = (frame for thread, frame in frames.items() if thread not in (self._main, own))
                loaders = [told for kind, _, told in map(look_at, others) if kind == "data"]
                stack = "; the loader ".join([stack, *loaders])
        return phase, waits, stack


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """Keeps Python from collecting garbage for a block that looks at the frames of other threads.

    Up to Python 3.11 a frame object is made when it is asked for, and making it may collect. What is freed then may let
    go of the interpreter, as a tensor does: the other thread returns from the frame in mid-making, and the object is
    one over memory that is used anew, of which a tensor has come back in the place of a frame."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def look_at(frame: FrameType | None) -> tuple[str, bool, str]:
    """Returns what a thread is doing, whether it waits for other ranks, and its innermost frames in words."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    of_ours = [(file.removeprefix(_PACKAGE), name) for file, name, _ in frames if file.startswith(_PACKAGE)]
    phase = "other"
    if any(part in file for file, _, _ in frames for part in _COMPILING):
        phase = "compilation"
    else:
        for sign, words in _PHASES:
            if any(sign in file or sign == name for file, name in of_ours):
                phase = words
                break
    told = [each for at, each in enumerate(frames) if at == 0 or "/lib/python" not in each[0]][:_MOST_FRAMES]
    stack = " < ".join(f"{Path(file).name}:{line} ({name})" for file, name, line in told)
    return phase, _waits(frames), stack


def _waits(frames: list[tuple[str, str, int]]) -> bool:
    """True if the innermost frame of this package or of torch is one that waits for other ranks."""
    for file, name, _ in frames:
        if file.startswith(_PACKAGE):
            own = file.removeprefix(_PACKAGE)
            return own.startswith(_WAITING) or (own, name) == _READING
        if "/torch/" in file:
            return any(part in file for part in _OF_TORCH)
    return False


def beat_file(folder: Path, rank: int) -> Path:
    """The file of a rank's newest beat, where a launcher on the same host reads it."""
    return folder / f"beat_{rank}"


@contextmanager
def beating_into(folder: Path, rank: int, pulse: Pulse) -> Iterator[None]:
    """Has a thread write this rank's beats into its file for a block."""
    path, is_over = beat_file(folder, rank), threading.Event()

    def beat() -> None:
        with suppress(OSError):  # the launcher has gone, and its folder with it
            while not is_over.wait(BEAT_S):
                path.write_text(pulse.beat().to_json())
            path.write_text(pulse.beat("done").to_json())

    thread = threading.Thread(target=beat, name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

"""The logs of a run: log.txt of the job, and logs/rank_00003.log with the standard error of rank 3.

Every rank but 0 writes its standard error to its log from the moment the run begins, whatever the
launcher does with it. Rank 0 keeps it on the terminal for the progress bar, and its lines go to
log.txt. A log that cannot be written does not stop a run."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel3d.errors import printable
from parallel3d.launch.files import rotate
from parallel3d.launch.run_record import has_begun, now

LOG_FILE = "log.txt"
_HEADER = "=== "  # First characters of the line at each start in the log of a rank.
_TAIL_BYTES = 4096
_terminal: int | None = None  # Descriptor of the original standard error inside `stderr_to_log`.


def write_log(run_dir: str | Path, text: str) -> None:
    """Adds a line with the time to log.txt, unless standard error goes to this file already."""
    path = Path(run_dir) / LOG_FILE
    with suppress(OSError):
        rotate(path)
        with path.open("a", encoding="utf-8") as file:
            if not os.path.samestat(os.fstat(file.fileno()), os.fstat(2)):
                file.write(f"{now()} {printable(text)}\n")


@contextmanager
def stderr_to_log(run_dir: Path, rank: int) -> Iterator[None]:
    """Context manager that sends standard error, also that of C libraries, to the log of a rank.

    After a crash, the log also has the Python stacks."""
    global _terminal
    path = _log_of_rank(run_dir, rank)
    header = f"{_HEADER}{now()} rank {rank} ({socket.gethostname()}, pid {os.getpid()})\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rotate(path)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(log, header.encode())
    except OSError:
        yield
        return
    sys.stderr.flush()
    _terminal = os.dup(2)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(2)
    try:
        yield
    finally:
        faulthandler.disable()
        sys.stderr.flush()
        os.dup2(_terminal, 2)
        os.close(_terminal)
        _terminal = None


def print_to_terminal(text: str) -> None:
    """Prints to the standard error that this process was started with."""
    if _terminal is None:
        print(text, file=sys.stderr, flush=True)
    else:
        os.write(_terminal, f"{text}\n".encode())


def see_log(run_dir: str | None, rank: int) -> str:
    """Returns "; see PATH" if the log of a rank has text of this start, else ""."""
    if not has_begun(run_dir):
        return ""
    path = _log_of_rank(str(run_dir), rank)
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        last_line = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        if last_line and not last_line.startswith(_HEADER):
            return f"; see {path}"
    return ""


def _log_of_rank(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / "logs" / f"rank_{rank:05d}.log"

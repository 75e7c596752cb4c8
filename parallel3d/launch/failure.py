"""Records failures of ranks, finds their root cause, prints the error line, and ends a failed
process."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from parallel3d.config.recipe import Recipe
from parallel3d.errors import Parallel3dError, RankError, RendezvousError, SaveError, printable
from parallel3d.launch.run_log import print_to_terminal, see_log, write_log
from parallel3d.launch.run_record import has_begun
from parallel3d.launch.signals import ignore_stop_signals

_LONGEST_TRACEBACK = 20_000  # Maximum length in characters, so that a report fits into a pipe.
# Matches the errors that gloo, NCCL and the store raise if a peer is lost.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|tim(ed|e) ?out|peer"
    r"|process group.*abort",
    re.I,
)
_LOST_PEER_CLASSES = ("DistError", "ConnectionError", "TimeoutError")
_ABORT_S = 5.0  # Seconds to wait for the abort of NCCL communicators, which can hang.


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of one rank, recorded by that rank if possible."""

    rank: int
    coordinates: str
    message: str
    host: str = field(default_factory=socket.gethostname)
    exit_status: int = RankError.exit_status
    traceback: str = ""
    # True if the process ended or hangs without reporting an error. `message` then continues the
    # sentence "rank 3 ...", as in "was killed by SIGKILL".
    died: bool = False
    foreseen: bool = False  # True for a Parallel3dError, which needs no traceback.
    secondary: bool = False  # True if only a consequence of a lost peer.
    at: float = field(default_factory=time.monotonic)  # In seconds, comparable within a host.
    reporter: int | None = None  # Rank that prints the failure, or None without a PeerMonitor.

    @classmethod
    def of(cls, error: BaseException, rank: int, recipe: Recipe) -> Failure:
        """Returns the failure of `rank` for an exception that occurred there."""
        message = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        exit_status = RankError.exit_status
        if isinstance(error, Parallel3dError):
            message = str(error)
            exit_status = error.exit_status
        else:
            message += see_log(recipe.run_dir, rank)
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            exit_status = error.code or exit_status  # An early exit is a failure, even with 0.
        return cls(
            rank=rank,
            coordinates=str(recipe.parallel.coordinates(rank)),
            message=message,
            exit_status=exit_status,
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
            foreseen=isinstance(error, Parallel3dError),
            secondary=is_lost_peer(error),
        )

    def traceback_for_user(self, *, verbose: bool) -> str:
        """Returns the traceback to print below the error line. For user errors and lost peers it is
        empty unless `verbose`."""
        is_wanted = verbose or not (self.foreseen or self.secondary)
        return "\n" + self.traceback.rstrip() if is_wanted and self.traceback else ""

    def line(self) -> str:
        """Returns the error line, with rank, host, coordinates and reason."""
        separator = " " if self.died else ": "
        return f"rank {self.rank} ({self.host}, {self.coordinates}){separator}{self.message}"


def is_lost_peer(error: BaseException) -> bool:
    """Returns True if the exception only says that another rank has ended or does not answer."""
    if isinstance(error, Parallel3dError):
        return isinstance(error, RankError | RendezvousError)
    if any(cls.__name__ in _LOST_PEER_CLASSES for cls in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that most likely caused the others.

    Failures other than lost peers come first, then ranks that died without a report, then the
    earliest. So a worker killed by SIGABRT is the cause if the others only lost peers."""
    return min(failures, key=lambda failure: (failure.secondary, not failure.died, failure.at))


def print_error(message: str, run_dir: str | None = None) -> None:
    """Prints `error: ...` to stderr, with further lines of the message indented. Shortens words
    from 400 and lines from 1,900 characters on, because values from a file can be very long. If the
    run in `run_dir` has begun, the message is also added to its log.txt."""
    message = re.sub(r"(\S{80})\S{320,}", r"\1...", printable(message))
    message = re.sub(r"(.{1500}).{400,}", r"\1 ...", message)
    text = "error: " + message.replace("\n", "\n       ")
    with suppress(OSError):  # A full disk must not change the exit status.
        print_to_terminal(text)
    if has_begun(run_dir):
        write_log(str(run_dir), text)


class _Output:
    """Forwards text to stdout or stderr. A failed write sets `error` and redirects the stream to
    /dev/null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            if not text:
                self._stream.flush()
        except OSError as error:
            self.error = error
            # Redirect the descriptor, because Python flushes the stream again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def flush(self) -> None:
        self.write("")


@contextmanager
def writing_output() -> Iterator[None]:
    """Context manager in which failed writes to stdout and stderr raise no errors.

    Raises SaveError at its start if stdout is closed, or at its end if a write to it failed."""
    if sys.stdout is None:  # The next opened file would get descriptor 1.
        raise SaveError("stdout: is closed; try > /dev/null")
    with open(os.devnull, "w") as nowhere:  # Takes descriptor 2 if stderr is closed.
        stdout: Any = _Output(sys.stdout)
        stderr: Any = _Output(sys.stderr or nowhere)
        with redirect_stdout(stdout), redirect_stderr(stderr):
            try:
                yield
            finally:
                stdout.flush()
                if stdout.error is not None:
                    raise SaveError(
                        f"stdout: cannot be written: {stdout.error.strerror}"
                    ) from stdout.error


def any_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks in words, as in `rank 3` or `ranks 0 and 4`. Names at most eight ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names[8:] = ["others"]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def record_flights(run_dir: str | None) -> None:
    """Makes torch record the last NCCL operations and write them to `run_dir` after a timeout.

    Sets environment variables that torch reads when it creates a process group, unless the user
    has. If `run_dir` is None, it is the current folder."""
    prefix = Path(run_dir or ".").absolute() / "nccl_flight_record_rank_"
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Number of operations: about the last few steps. 0 disables the flight recorder.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))


def end_process(exit_status: int) -> NoReturn:
    """Ends this process immediately after a reported failure.

    Process groups are aborted, not destroyed, and exit handlers do not run, because NCCL could wait
    for lost peers forever. Peers that wait for this process get an error when its sockets close."""
    ignore_stop_signals()
    with suppress(OSError, ValueError):  # The output is closed.
        sys.stdout.flush()
        sys.stderr.flush()
    if "torch" in sys.modules:
        from parallel3d.torch_private import abort_groups

        abort = threading.Thread(target=abort_groups, daemon=True)
        abort.start()
        abort.join(_ABORT_S)
    os._exit(exit_status)

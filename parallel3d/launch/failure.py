"""The record of a failed rank, the search for the root cause among several failures, and the error
line."""

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

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import Parallel3dError, RankError, RendezvousError, SaveError, printable
from parallel3d.launch.signals import ignore_stop_signals

_LONGEST_TRACEBACK = 20_000  # Maximum length in characters, so that a report fits into a pipe.
# Words that gloo, NCCL and the store use if a peer has gone.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|tim(ed|e) ?out|peer"
    r"|process group.*abort",
    re.I,
)
_LOST_PEER_CLASSES = ("DistError", "ConnectionError", "TimeoutError")
_ABORT_S = 5.0  # An abort of NCCL communicators that takes longer never ends.


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one rank, recorded by the rank itself if possible."""

    rank: int
    coordinates: str
    message: str
    host: str = field(default_factory=socket.gethostname)
    exit_status: int = RankError.exit_status
    traceback: str = ""
    # The process ended or hangs without a report. `message` says what happened.
    died: bool = False
    foreseen: bool = False  # True for a Parallel3dError, which needs no traceback.
    secondary: bool = False  # True if the failure is only a consequence of a lost peer.
    # Time of the failure, by a clock that the processes of a host share.
    at: float = field(default_factory=time.monotonic)
    # The rank that prints the failure, if ranks monitor each other. None: the launcher.
    reporter: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, parallel: ParallelConfig) -> Failure:
        """Records an exception on the rank where it occurred."""
        message = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        exit_status = RankError.exit_status
        if isinstance(error, Parallel3dError):
            message = str(error)
            exit_status = error.exit_status
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            exit_status = error.code or exit_status  # A worker that exits early has failed.
        return cls(
            rank=rank,
            coordinates=str(parallel.coordinates(rank)),
            message=message,
            exit_status=exit_status,
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
            foreseen=isinstance(error, Parallel3dError),
            secondary=is_lost_peer(error),
        )

    def traceback_for_user(self, *, verbose: bool) -> str:
        """Returns the traceback to print below the error line. Errors of the user and lost peers do
        not need one."""
        is_wanted = verbose or not (self.foreseen or self.secondary)
        return "\n" + self.traceback.rstrip() if is_wanted and self.traceback else ""

    def line(self) -> str:
        """Returns the error line, with rank, host, coordinates and reason."""
        separator = " " if self.died else ": "
        return f"rank {self.rank} ({self.host}, {self.coordinates}){separator}{self.message}"


def is_lost_peer(error: BaseException) -> bool:
    """Returns True if the exception is only about another rank that has gone or does not answer."""
    if isinstance(error, Parallel3dError):
        return isinstance(error, RankError | RendezvousError)
    if any(cls.__name__ in _LOST_PEER_CLASSES for cls in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that caused the others: the earliest that is not about a lost peer.

    An aborted process may have lost a peer or may have a reason of its own. It is the cause if all
    other failures are lost peers."""
    return min(failures, key=lambda failure: (failure.secondary, not failure.died, failure.at))


def print_error(message: str) -> None:
    """Prints `error: ...` to stderr, with further lines of the message indented. Shortens long
    words and lines, because values from a file can be very long."""
    message = re.sub(r"(\S{80})\S{320,}", r"\1...", printable(message))
    message = re.sub(r"(.{1500}).{400,}", r"\1 ...", message)
    with suppress(OSError):  # A full disk must not change the exit status.
        print("error: " + message.replace("\n", "\n       "), file=sys.stderr, flush=True)


class _Output:
    """Forwards text to stdout or stderr. After a failed write it keeps the error and drops further
    text."""

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
            # Python flushes again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def flush(self) -> None:
        self.write("")


@contextmanager
def writing_output() -> Iterator[None]:
    """Context manager for code that errors of its output must not interrupt. Errors of stderr are
    ignored. At the end, raises SaveError if stdout could not be written.
    """
    if sys.stdout is None:  # Otherwise the next file that is opened would get its descriptor.
        raise SaveError("stdout: is closed; try > /dev/null")
    with open(os.devnull, "w") as nowhere:  # It takes the descriptor of stderr, if that is closed.
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
    """Formats ranks in words, as in `rank 3` or `ranks 0 and 4`. Long lists are shortened."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names[8:] = ["others"]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def record_flights(run_dir: str | None) -> None:
    """Makes NCCL record its last operations and write them to `run_dir` after a timeout.

    torch reads these environment variables when it creates a process group. Values set by the user
    stay."""
    prefix = Path(run_dir or ".").absolute() / "nccl_flight_record_rank_"
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Number of operations, which covers the last few steps. 0 would turn it off.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))


def end_process(exit_status: int) -> NoReturn:
    """Ends this process immediately after a reported failure.

    Process groups are aborted, not destroyed, because NCCL would wait for peers without end. Exit
    handlers do not run for the same reason. Closing the sockets of this process releases waiting
    peers."""
    ignore_stop_signals()
    with suppress(OSError, ValueError):  # The reader of the output may have gone.
        sys.stdout.flush()
        sys.stderr.flush()
    if "torch" in sys.modules:
        from parallel3d.torch_private import abort_groups

        abort = threading.Thread(target=abort_groups, daemon=True)
        abort.start()
        abort.join(_ABORT_S)
    os._exit(exit_status)

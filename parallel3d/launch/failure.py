"""The record of a failed rank, the choice of the failure that caused the others, and the line that
reports it."""

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

_LONGEST_TRACEBACK = 20_000  # characters; a report must fit into a pipe at once
# gloo, NCCL and the store use these words when a peer has gone.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|tim(ed|e) ?out|peer"
    r"|process group.*abort",
    re.I,
)
_LOST_PEER_CLASSES = ("DistError", "ConnectionError", "TimeoutError")
_ABORT_S = 5.0  # an abort of NCCL's communicators that takes longer never ends


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one rank, recorded by the rank itself where it could."""

    rank: int
    coordinates: str
    message: str
    host: str = field(default_factory=socket.gethostname)
    exit_status: int = RankError.exit_status
    traceback: str = ""
    # the process ended, or hangs, without a report, and `message` says what happened to it
    died: bool = False
    foreseen: bool = False  # the error is a Parallel3dError, whose message needs no traceback
    secondary: bool = False  # the failure is only the consequence of a lost peer
    at: float = field(default_factory=time.monotonic)  # a clock that the processes of a host share
    reporter: int | None = None  # the rank that prints it, if ranks monitor each other

    @classmethod
    def of(cls, error: BaseException, rank: int, parallel: ParallelConfig) -> Failure:
        """Makes the record of an exception, on the rank that it ended."""
        message = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        exit_status = RankError.exit_status
        if isinstance(error, Parallel3dError):
            message = str(error)
            exit_status = error.exit_status
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            exit_status = error.code or exit_status  # a worker that exits has not done its work
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
        """Returns the traceback to print below the line. Errors of the user and losses of a peer
        need none."""
        is_wanted = verbose or not (self.foreseen or self.secondary)
        return "\n" + self.traceback.rstrip() if is_wanted and self.traceback else ""

    def line(self) -> str:
        """Returns the line that says which rank failed, and how."""
        separator = " " if self.died else ": "
        return f"rank {self.rank} ({self.host}, {self.coordinates}){separator}{self.message}"


def is_lost_peer(error: BaseException) -> bool:
    """True if an exception says that another rank has gone or stayed silent, and nothing about this
    rank."""
    if isinstance(error, Parallel3dError):
        return isinstance(error, RankError | RendezvousError)
    if any(cls.__name__ in _LOST_PEER_CLASSES for cls in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that caused the others: the earliest that is not about a lost peer. A
    process that was aborted may have aborted for the loss of a peer or for a reason of its own: it
    is the cause where no other failure is, and ranks merely say that they have lost a peer."""
    return min(failures, key=lambda failure: (failure.secondary, not failure.died, failure.at))


def print_error(message: str) -> None:
    """Writes `error: ...` on stderr, with the further lines of the message below the first. Cuts
    long words and long lines: a value of a file may fill pages."""
    message = re.sub(r"(\S{80})\S{320,}", r"\1...", printable(message))
    message = re.sub(r"(.{1500}).{400,}", r"\1 ...", message)
    with suppress(OSError):  # a full disk leaves the exit status as it is
        print("error: " + message.replace("\n", "\n       "), file=sys.stderr, flush=True)


class _Output:
    """Passes text on to stdout or stderr, and keeps the error of a write that fails. Later text is
    dropped."""

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
            # Python flushes again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def flush(self) -> None:
        self.write("")


@contextmanager
def writing_output() -> Iterator[None]:
    """Writes what the block prints, and ignores errors of stderr. Raises SaveError at the end of
    the block if stdout could not be written."""
    if sys.stdout is None:  # the next file that is opened would get its descriptor
        raise SaveError("stdout: it is closed; try > /dev/null")
    with open(os.devnull, "w") as nowhere:  # gets the descriptor of stderr if that is closed
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
    """Returns the ranks in words, a long list cut short: `rank 3`, `ranks 0 and 4`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names[8:] = ["others"]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def record_flights(run_dir: str | None) -> None:
    """Has NCCL keep its last operations and write them into `run_dir` when one of them times out,
    unless the user's environment says otherwise. torch reads these variables when it makes a
    process group."""
    prefix = Path(run_dir or ".").absolute() / "nccl_flight_record_rank_"
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # operations of a rank, the last few steps; 0 turns it off
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))


def end_process(exit_status: int) -> NoReturn:
    """Ends this process at once after a failure that has been told.

    No process group is destroyed, because NCCL's wait for work of peers that has no end; they are
    aborted. Exit handlers are left out for the same reason. What peers wait for closes with the
    process."""
    ignore_stop_signals()
    with suppress(OSError, ValueError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    if "torch" in sys.modules:
        from parallel3d.torch_private import abort_groups

        abort = threading.Thread(target=abort_groups, daemon=True)
        abort.start()
        abort.join(_ABORT_S)
    os._exit(exit_status)

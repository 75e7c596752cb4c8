"""What a failed rank leaves behind, which of several failures is the cause of the others, and how it is told."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.errors import Parallel3dError, RankError, RendezvousError

_LONGEST_TRACEBACK = 20_000  # characters; a report must fit into a pipe at once
# What gloo, NCCL and the store say where a peer has gone.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|tim(ed|e) ?out|peer|process group.*abort",
    re.I,
)
_LOST_PEER_CLASSES = ("DistError", "ConnectionError", "TimeoutError")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended, told by itself where it could."""

    rank: int
    host: str
    coordinates: str
    exit_status: int
    message: str
    traceback: str = ""
    died: bool = False  # ended without a word: `message` is then what happened to it
    foreseen: bool = False  # a Parallel3dError: the message says it all, and the traceback helps nobody
    secondary: bool = False  # only the consequence of a lost peer
    at: float  # time.monotonic(), which the processes of a host share

    @classmethod
    def of(cls, error: BaseException, rank: int, coordinates: str) -> Failure:
        """The record of an exception, made by the rank that it ended."""
        foreseen = isinstance(error, Parallel3dError)
        one_line = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        exit_status = RankError.exit_status
        if isinstance(error, Parallel3dError):
            exit_status = error.exit_status
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            exit_status = error.code
        return cls(
            rank=rank,
            host=socket.gethostname(),
            coordinates=coordinates,
            exit_status=exit_status,
            message=str(error) if foreseen else one_line,
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
            foreseen=foreseen,
            secondary=is_lost_peer(error),
            at=time.monotonic(),
        )

    @classmethod
    def of_death(cls, exitcode: int, rank: int, coordinates: str) -> Failure:
        """The record of a local process that ended without one. A negative `exitcode` is a signal's."""
        if exitcode == -signal.SIGKILL:
            message = "was killed by SIGKILL; if nobody sent it, the host ran out of memory (see dmesg)"
        elif exitcode < 0:
            message = f"was killed by {signal.Signals(-exitcode).name}"
        else:
            message = f"ended with status {exitcode} and without a word"
        # A communication library that loses a peer may abort its process.
        secondary = exitcode == -signal.SIGABRT
        return cls.of_silence(message, rank, coordinates, secondary=secondary)

    @classmethod
    def of_silence(cls, message: str, rank: int, coordinates: str, *, secondary: bool = False) -> Failure:
        """The record of a local process that cannot speak for itself."""
        return cls(
            rank=rank,
            host=socket.gethostname(),
            coordinates=coordinates,
            exit_status=RankError.exit_status,
            message=message,
            died=True,
            secondary=secondary,
            at=time.monotonic(),
        )

    def line(self) -> str:
        """Who failed and how."""
        return f"rank {self.rank} ({self.host}, {self.coordinates}){' ' if self.died else ': '}{self.message}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank has gone or stayed silent, and nothing of this one."""
    if isinstance(error, RankError | RendezvousError):
        return True
    if isinstance(error, Parallel3dError):
        return False
    if any(cls.__name__ in _LOST_PEER_CLASSES for cls in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that does not speak of a lost peer."""
    return min(failures, key=lambda failure: (failure.secondary, failure.at))


def told_once(cause: Failure, failures: Sequence[Failure], world_size: int) -> str:
    """The line for the user. What every rank says alike is about the run, and not about a rank."""
    of_the_run = len(failures) == world_size and all(failure.message == cause.message for failure in failures)
    return cause.message if of_the_run and cause.foreseen else cause.line()


def print_error(message: str) -> None:
    """Writes `error: ...` on stderr, further lines of the message below its first."""
    print("error: " + message.replace("\n", "\n       "), file=sys.stderr, flush=True)

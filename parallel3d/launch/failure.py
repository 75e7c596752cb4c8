"""The record of a failed rank, the choice of the failure that caused the others, and the line that reports it."""

from __future__ import annotations

import re
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from parallel3d.errors import Parallel3dError, RankError, RendezvousError

_LONGEST_TRACEBACK = 20_000  # characters; a report must fit into a pipe at once
# gloo, NCCL and the store use these words when a peer has gone.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|tim(ed|e) ?out|peer|process group.*abort",
    re.I,
)
_LOST_PEER_CLASSES = ("DistError", "ConnectionError", "TimeoutError")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one rank, recorded by the rank itself where it could."""

    rank: int
    coordinates: str
    message: str
    host: str = field(default_factory=socket.gethostname)
    exit_status: int = RankError.exit_status
    traceback: str = ""
    died: bool = False  # the process ended, or hangs, without a report, and `message` says what happened to it
    foreseen: bool = False  # the error is a Parallel3dError, whose message needs no traceback
    secondary: bool = False  # the failure is only the consequence of a lost peer
    at: float = field(default_factory=time.monotonic)  # a clock that the processes of a host share

    @classmethod
    def of(cls, error: BaseException, rank: int, coordinates: str) -> Failure:
        """Makes the record of an exception, on the rank that it ended."""
        message = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        exit_status = RankError.exit_status
        if isinstance(error, Parallel3dError):
            message, exit_status = str(error), error.exit_status
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            exit_status = error.code
        return cls(
            rank=rank,
            coordinates=coordinates,
            message=message,
            exit_status=exit_status,
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
            foreseen=isinstance(error, Parallel3dError),
            secondary=is_lost_peer(error),
        )

    def line(self) -> str:
        """Returns the line that says which rank failed, and how."""
        return f"rank {self.rank} ({self.host}, {self.coordinates}){' ' if self.died else ': '}{self.message}"


def is_lost_peer(error: BaseException) -> bool:
    """True if an exception says that another rank has gone or stayed silent, and nothing about this rank."""
    if isinstance(error, Parallel3dError):
        return isinstance(error, RankError | RendezvousError)
    if any(cls.__name__ in _LOST_PEER_CLASSES for cls in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that caused the others: the earliest that is not about a lost peer."""
    return min(failures, key=lambda failure: (failure.secondary, failure.at))


def print_error(message: str) -> None:
    """Writes `error: ...` on stderr, further lines of the message below its first."""
    print("error: " + message.replace("\n", "\n       "), file=sys.stderr, flush=True)

"""Exceptions that users can see. Each has the exit status with which a command ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# An escape character, unless it begins an ANSI style that this project prints.
_OWN_STYLE = r"\x1b(?!\[(?:0|1|30;48;5;\d{1,3})m)"
_STEERING = re.compile(
    _OWN_STYLE + r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Parallel3dError(Exception):
    """Base class of all exceptions here. `exit_status` is the exit status of the command."""

    exit_status = 1


class ConfigError(Parallel3dError):
    exit_status = 2  # Invalid key or value. The message names the rule and a value that works.


class ClusterError(Parallel3dError):
    """The recipe would not run on this cluster, according to `parallel3d-launch check`."""


class DataError(Parallel3dError):
    exit_status = 65  # The training data cannot be read or used.


class CheckpointError(Parallel3dError):
    exit_status = 65  # The checkpoint cannot be loaded.


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are damaged. Another checkpoint of the run may be intact."""


class SaveError(Parallel3dError):
    exit_status = 73  # A checkpoint or other output cannot be written.


class NotSavedInTimeError(SaveError):
    """A signal stopped the run, and it could not save its state within `checkpoint.grace_s`.

    The exit status is 128 + signal number, as if the signal had killed the process.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message, signum)
        self.exit_status = 128 + signum

    def __str__(self) -> str:
        return str(self.args[0])


class RunLockedError(Parallel3dError):
    exit_status = 73  # Another run is using the run folder.


class SinkError(Parallel3dError):
    exit_status = 73  # A logging service rejects data.


class RendezvousError(Parallel3dError):
    exit_status = 69  # The workers could not connect to each other.


class RankError(Parallel3dError):
    exit_status = 70  # A worker died, failed or hung.


class ReplicaError(Parallel3dError):
    exit_status = 70  # Copies of a replicated tensor differ between ranks.


class ScheduleError(Parallel3dError):
    exit_status = 70  # The pipeline schedule cannot complete.


class NonFiniteError(Parallel3dError):
    exit_status = 71  # The loss or gradient norm is NaN or infinite.


class SpikeError(NonFiniteError):
    """The loss or gradient norm is finite, but spikes persist after the attempts to recover."""


class PreemptedError(Parallel3dError):
    exit_status = 75  # The run was asked to stop and has saved its state.


class CtrlCError(PreemptedError):
    exit_status = 130  # Ctrl-C stopped the run, so it must not be restarted automatically.


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager for code that writes `path`. Converts an OSError to a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
        ) from error


def printable(text: str) -> str:
    """Escapes control characters in `text`, except newlines, tabs and this project's styles."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

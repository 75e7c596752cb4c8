"""Exceptions that users can see, with the exit status of the command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# An escape character, unless it begins a style that this project prints.
_OWN_STYLE = r"\x1b(?!\[(?:0|1|30;48;5;\d{1,3})m)"
_STEERING = re.compile(
    _OWN_STYLE + r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Parallel3dError(Exception):
    """Base class. `exit_status` is the exit status of the command."""

    exit_status = 1


class ConfigError(Parallel3dError):
    exit_status = 2  # Invalid key or value. The message names the rule and a value that works.


class ClusterError(Parallel3dError):
    """Raised if a recipe would not run on this cluster, according to `parallel3d-launch check`."""


class DataError(Parallel3dError):
    exit_status = 65  # A corpus or batch that cannot be used for training.


class CheckpointError(Parallel3dError):
    exit_status = 65  # A checkpoint that cannot be loaded.


class DamagedCheckpointError(CheckpointError):
    """Damaged checkpoint files. Another checkpoint of the run may be intact."""


class SaveError(Parallel3dError):
    exit_status = 73  # A checkpoint or other output file that cannot be written.


class NotSavedInTimeError(SaveError):
    """A run that a signal ended before it saved its state within checkpoint.grace_s.

    The exit status is that of a process killed by the signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message, signum)
        self.exit_status = 128 + signum

    def __str__(self) -> str:
        return str(self.args[0])


class RunLockedError(Parallel3dError):
    exit_status = 73  # Another run writes to the folder.


class SinkError(Parallel3dError):
    exit_status = 73  # A logging service that rejects data.


class RendezvousError(Parallel3dError):
    exit_status = 69  # Workers that did not find each other.


class RankError(Parallel3dError):
    exit_status = 70  # A worker that died, failed or hung.


class ReplicaError(Parallel3dError):
    exit_status = 70  # Ranks whose replicated tensors differ.


class ScheduleError(Parallel3dError):
    exit_status = 70  # A pipeline schedule that cannot complete.


class NonFiniteError(Parallel3dError):
    exit_status = 71  # A NaN or infinite loss or gradient norm.


class SpikeError(NonFiniteError):
    """A loss or gradient norm that is finite but keeps spiking after recovery attempts."""


class PreemptedError(Parallel3dError):
    exit_status = 75  # A run that was asked to stop and has saved its state.


class CtrlCError(PreemptedError):
    exit_status = 130  # Stopped by Ctrl-C. The run must not be restarted automatically.


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager for code that writes `path`. Converts file system errors to SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
        ) from error


def printable(text: str) -> str:
    """Escapes control characters of terminals in `text`, except newlines and tabs."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

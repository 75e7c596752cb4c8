"""Every error that a user can meet, each with the exit status that a command ends with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# an escape, unless it begins a style that this project prints
_OWN_STYLE = r"\x1b(?!\[(?:0|1|30;48;5;\d{1,3})m)"
_STEERING = re.compile(
    _OWN_STYLE + r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Parallel3dError(Exception):
    """Base of the tree; `exit_status` is what a command returns for it."""

    exit_status = 1


class ConfigError(Parallel3dError):
    exit_status = 2  # a key, a value, the rule it breaks, a value that would do


class ClusterError(Parallel3dError):
    """A recipe would not run on this cluster, as `parallel3d-launch check` has found."""


class DataError(Parallel3dError):
    exit_status = 65  # a corpus or a batch that cannot be trained on


class CheckpointError(Parallel3dError):
    exit_status = 65  # a checkpoint that cannot be read


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not those that were saved. Another checkpoint of the run may do."""


class SaveError(Parallel3dError):
    exit_status = 73  # a checkpoint or another file of a run that cannot be written


class NotSavedInTimeError(SaveError):
    """A run was asked to end by a signal, and had not saved its state within checkpoint.grace_s.
    Its exit status is that of a process which the signal has ended."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message, signum)
        self.exit_status = 128 + signum

    def __str__(self) -> str:
        return str(self.args[0])


class RunLockedError(Parallel3dError):
    exit_status = 73  # another run writes into the folder


class SinkError(Parallel3dError):
    exit_status = 73  # a dashboard that does not take what is sent to it


class RendezvousError(Parallel3dError):
    exit_status = 69  # the workers did not find each other


class RankError(Parallel3dError):
    exit_status = 70  # a worker died, raised or hung


class ReplicaError(Parallel3dError):
    exit_status = 70  # ranks that must hold the same tensors do not


class ScheduleError(Parallel3dError):
    exit_status = 70  # a pipeline schedule that cannot run to its end


class NonFiniteError(Parallel3dError):
    exit_status = 71  # the loss or the gradient norm is NaN or infinite


class SpikeError(NonFiniteError):
    """The loss or the gradient norm is finite, and spikes again whatever is done about it."""


class PreemptedError(Parallel3dError):
    exit_status = 75  # the run was asked to end, and has saved its state


class CtrlCError(PreemptedError):
    exit_status = 130  # Ctrl-C has asked for it, and nothing is to start the run again by itself


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the file system in this block, which writes `path`, into a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
        ) from error


def printable(text: str) -> str:
    """Returns `text` with the characters that steer a terminal as escapes. Newlines and tabs
    stay."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

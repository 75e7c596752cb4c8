"""Every error that a user can meet, each with the exit status that a command ends with.

Parallel3dError            1
├── ConfigError            2   a key, a value, the rule it breaks, a value that would do
├── DataError             65   a corpus or a batch that cannot be trained on
├── CheckpointError       65   a checkpoint that cannot be read
│   └── DamagedCheckpointError 65   ... because its files are not those that were saved
├── SaveError             73   a checkpoint that cannot be written
├── RendezvousError       69   the workers did not find each other
├── RankError             70   a worker died, raised or hung
├── ScheduleError         70   a pipeline schedule that cannot run to its end
└── NonFiniteError        71   the loss or the gradient norm is NaN or infinite
"""

from __future__ import annotations


class Parallel3dError(Exception):
    """Base of the tree; `exit_status` is what a command returns for it."""

    exit_status = 1


class ConfigError(Parallel3dError):
    exit_status = 2


class DataError(Parallel3dError):
    exit_status = 65


class CheckpointError(Parallel3dError):
    exit_status = 65


class DamagedCheckpointError(CheckpointError):
    """Another checkpoint of the run may do."""


class SaveError(Parallel3dError):
    exit_status = 73


class RendezvousError(Parallel3dError):
    exit_status = 69


class RankError(Parallel3dError):
    exit_status = 70


class ScheduleError(Parallel3dError):
    exit_status = 70


class NonFiniteError(Parallel3dError):
    exit_status = 71


class PreemptedError(Parallel3dError):
    """The run was asked to end, and has saved its state."""

    exit_status = 75

"""The place of a worker among all, and where it meets the others, as the launcher says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from parallel3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The place of one worker among all. `init_method` is torch's name for where they meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    init_method: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """Reads what torchrun (or srun, or an MPI) has set. Returns None where no launcher started this process as one
        of several."""
        if "RANK" in environ:
            names = _EnvironmentNames("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "MASTER_ADDR" in environ and environ.get("SLURM_NTASKS", "1") != "1":
            names = _EnvironmentNames("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        else:
            return None
        rank = _whole_number(environ, names.rank)
        world_size = _whole_number(environ, names.world_size)
        local_world_size = _whole_number(environ, names.local_world_size, default=world_size)
        local_rank = _whole_number(environ, names.local_rank, default=rank % max(1, local_world_size))
        if rank >= world_size:
            raise ConfigError(f"{names.rank} = {rank}: must be below {names.world_size} = {world_size}")
        for name, example in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "29500")):
            if not environ.get(name):
                raise ConfigError(
                    f"{name} is not set, and {names.rank} is: the launcher must set both; try {name}={example}"
                )
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            init_method="env://",
        )


@dataclass(frozen=True)
class _EnvironmentNames:
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


def _whole_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        said = "is not set" if text is None else f"= {text}: must be a whole number"
        raise ConfigError(f"{name} {said}; unset RANK to start the workers here, or start them with torchrun")
    return int(text)

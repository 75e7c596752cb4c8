"""The part of a checkpoint about replicas that train apart. Such a run and a synchronous one read
each other's checkpoints.

model.<name>                 outer parameters, which export and other runs take for the model
outer.momentum.<name>        momentum of the outer optimizer
outer.mean.<name>            mean pseudo-gradient of a fragment that no outer step has used yet
replica.<r>.<other names>    the tensors of a synchronous run, for each replica
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel3d.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class SavedReplicas:
    """The replicas of the run that wrote a checkpoint, as `Progress.local_sgd` holds them."""

    replicas: int
    sync_every: int
    fragments: int
    overlap_steps: int
    has_momentum: bool
    on_their_way: list[int]  # fragments

    @classmethod
    def read(cls, value: Mapping[str, Any] | None, path: Path) -> SavedReplicas | None:
        """Returns None for the checkpoint of a synchronous run. Raises CheckpointError if `value`
        is malformed."""
        if value is None:
            return None
        try:
            return cls(**value)
        except TypeError as error:
            raise CheckpointError(
                f"{path}: what it says of local_sgd cannot be read: {error}"
            ) from error


def tensors_of_one_replica(
    state: dict[str, Tensor], saved: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """Maps names in a checkpoint to the tensors of a synchronous run: the outer parameters, and all
    else of the first replica."""
    if saved is None:
        return state
    own = {name: tensor for name, tensor in state.items() if not name.startswith("model.")}
    renamed = {f"replica.0.{name}": tensor for name, tensor in own.items()}
    return renamed | {name: tensor for name, tensor in state.items() if name not in own}

"""The part of a checkpoint that holds replicas that train apart. Such a run and a synchronous one read each other's.

model.<name>                 the outer parameters, which export, and any other run, take for the model
outer.momentum.<name>        the momentum of the outer optimizer
outer.mean.<name>            the mean pseudo-gradient of a fragment on its way, which no outer step has used yet
replica.<r>.<other names>    everything that a synchronous run would hold, for each replica
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.errors import CheckpointError
from parallel3d.training.local_sgd.replicas import LocalSgd, OuterParameter

Tensors = dict[str, Tensor]  # keyed by their names in a checkpoint


@dataclass(frozen=True, kw_only=True)
class SavedReplicas:
    """The part of a checkpoint's progress file that is about its replicas."""

    replicas: int
    sync_every: int
    fragments: int
    overlap_steps: int
    has_momentum: bool
    on_their_way: list[int]  # fragments

    @classmethod
    def read(cls, value: dict[str, Any] | None, path: Path) -> SavedReplicas | None:
        """Reads the part, which is None in a synchronous run's checkpoint. Raises CheckpointError where it is
        malformed."""
        if value is None:
            return None
        try:
            saved = cls(**value)
            if saved.replicas < 1 or not all(0 <= fragment < saved.fragments for fragment in saved.on_their_way):
                raise ValueError("impossible numbers")
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: what it says of local_sgd cannot be read: {error}") from error
        return saved


def saved_replicas(local_sgd: LocalSgd) -> dict[str, Any]:
    """Returns what the progress file says of the replicas. Call it after `tensors_to_save`."""
    return asdict(
        SavedReplicas(
            replicas=local_sgd.replicas.size,
            **asdict(local_sgd.schedule),
            has_momentum=local_sgd.config.outer_momentum > 0,
            on_their_way=local_sgd.settle(),
        )
    )


def tensors_to_save(local_sgd: LocalSgd | None, state: Tensors) -> Tensors:
    """Adds the outer loop's tensors to `state`, a replica's own. Every rank calls it, because fragments on their way
    must arrive first."""
    if local_sgd is None:
        return state
    local_sgd.settle()
    tensors = {f"replica.{local_sgd.replicas.rank}.{name}": tensor for name, tensor in state.items()}
    return tensors | _outer_tensors(local_sgd, with_momentum=local_sgd.config.outer_momentum > 0)


def tensors_to_load(local_sgd: LocalSgd | None, state: Tensors, saved: SavedReplicas | None) -> Tensors:
    """Maps names in a checkpoint to the tensors of `state` and of the outer loop that they are loaded into."""
    if local_sgd is None:  # the model is the outer one, and all else is a replica's
        is_apart = saved is not None
        return {f"replica.0.{n}" if is_apart and not n.startswith("model.") else n: x for n, x in state.items()}
    for outer in local_sgd.parameters:
        outer.mean = None
    for fragment in _continued(local_sgd, saved):
        for outer in local_sgd.fragments[fragment]:
            outer.mean = torch.zeros_like(outer.value)
    has_momentum = saved is not None and saved.has_momentum and local_sgd.config.outer_momentum > 0
    own = "" if saved is None else f"replica.{local_sgd.replicas.rank % saved.replicas}."
    keeps_replicas = saved is not None and saved.replicas == local_sgd.replicas.size
    return _outer_tensors(local_sgd, with_momentum=has_momentum) | {
        f"{own}{name}": tensor for name, tensor in state.items() if keeps_replicas or not name.startswith("model.")
    }


@torch.no_grad()
def after_loading(local_sgd: LocalSgd, saved: SavedReplicas | None) -> None:
    """Completes the outer loop after loading. Each replica starts from the outer parameters, unless the checkpoint
    holds equally many replicas."""
    first: dict[str, OuterParameter] = {}
    for outer in local_sgd.parameters:
        momentum = local_sgd.optimizer.state[outer.value].get("momentum_buffer")
        if momentum is not None and (saved is None or not saved.has_momentum):
            momentum.zero_()
        twin = first.setdefault(outer.inner.name, outer)
        if twin is not outer:  # a tied weight that this rank has twice is in the checkpoint once
            outer.value.copy_(twin.value)
            if momentum is not None:
                momentum.copy_(local_sgd.optimizer.state[twin.value]["momentum_buffer"])
            if outer.mean is not None and twin.mean is not None:
                outer.mean.copy_(twin.mean)
    keeps_replicas = saved is not None and saved.replicas == local_sgd.replicas.size
    local_sgd.resume(_continued(local_sgd, saved), from_outer=not keeps_replicas)


def _continued(local_sgd: LocalSgd, saved: SavedReplicas | None) -> list[int]:
    """Returns the checkpoint's fragments on their way, if this run synchronises by the same schedule."""
    is_same = saved is not None and asdict(local_sgd.schedule).items() <= asdict(saved).items()
    return saved.on_their_way if saved is not None and is_same else []


def _outer_tensors(local_sgd: LocalSgd, *, with_momentum: bool) -> Tensors:
    """Maps names to the tensors that all ranks of a replica hold together, the first of each name."""
    tensors: Tensors = {}
    for outer in local_sgd.parameters:
        kinds = {"model": outer.value}
        if with_momentum:
            kinds["outer.momentum"] = local_sgd.optimizer.state[outer.value]["momentum_buffer"]
        if outer.mean is not None:
            kinds["outer.mean"] = outer.mean
        for kind, tensor in kinds.items():
            tensors.setdefault(f"{kind}.{outer.inner.name}", outer.inner.distributed(tensor))
    return tensors

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
_MODEL = "model."


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

    def has_schedule_of(self, local_sgd: LocalSgd) -> bool:
        now = local_sgd.schedule
        return (self.sync_every, self.fragments, self.overlap_steps) == (
            now.sync_every,
            now.fragments,
            now.overlap_steps,
        )


def saved_replicas(local_sgd: LocalSgd) -> dict[str, Any]:
    """Returns what the progress file says of the replicas. Call it after `tensors_to_save`."""
    return asdict(
        SavedReplicas(
            replicas=local_sgd.replicas.size,
            sync_every=local_sgd.schedule.sync_every,
            fragments=local_sgd.schedule.fragments,
            overlap_steps=local_sgd.schedule.overlap_steps,
            has_momentum=local_sgd.config.outer_momentum > 0,
            on_their_way=local_sgd.settle(),
        )
    )


def tensors_to_save(local_sgd: LocalSgd | None, state: Tensors) -> Tensors:
    """Adds the outer loop's tensors to `state`, a replica's own. Every rank calls it, because fragments on their way
    must arrive first."""
    if local_sgd is None:
        return state
    tensors = {f"replica.{local_sgd.replicas.rank}.{name}": tensor for name, tensor in state.items()}
    tensors |= _values(local_sgd)
    if local_sgd.config.outer_momentum > 0:
        tensors |= _momenta(local_sgd)
    return tensors | _means(local_sgd, local_sgd.settle())


def tensors_to_load(local_sgd: LocalSgd | None, state: Tensors, saved: SavedReplicas | None) -> Tensors:
    """Maps names in a checkpoint to the tensors of `state` and of the outer loop that they are loaded into."""
    if local_sgd is None:
        return state if saved is None else {_of_replica(0, name): tensor for name, tensor in state.items()}
    tensors = _values(local_sgd)
    if saved is None:
        return tensors | {name: tensor for name, tensor in state.items() if not name.startswith(_MODEL)}
    replica = local_sgd.replicas.rank % saved.replicas
    is_same = saved.replicas == local_sgd.replicas.size
    for name, tensor in state.items():
        if is_same or not name.startswith(_MODEL):
            tensors[f"replica.{replica}.{name}"] = tensor
    if saved.has_momentum and local_sgd.config.outer_momentum > 0:
        tensors |= _momenta(local_sgd)
    if saved.has_schedule_of(local_sgd):
        for outer in _parameters_of(local_sgd, saved.on_their_way):
            outer.mean = torch.zeros_like(outer.value)
        tensors |= _means(local_sgd, saved.on_their_way)
    return tensors


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
    goes_on = saved is not None and saved.replicas == local_sgd.replicas.size
    on_their_way = saved.on_their_way if saved is not None and saved.has_schedule_of(local_sgd) else []
    local_sgd.resume(on_their_way, from_outer=not goes_on)


def _of_replica(replica: int, name: str) -> str:
    """Returns the name from which a run loads: the outer model's, and for all else the replica's."""
    return name if name.startswith(_MODEL) else f"replica.{replica}.{name}"


def _values(local_sgd: LocalSgd) -> Tensors:
    return _by_name("model", [(outer, outer.value) for outer in local_sgd.parameters])


def _momenta(local_sgd: LocalSgd) -> Tensors:
    state = local_sgd.optimizer.state
    return _by_name(
        "outer.momentum", [(outer, state[outer.value]["momentum_buffer"]) for outer in local_sgd.parameters]
    )


def _means(local_sgd: LocalSgd, fragments: list[int]) -> Tensors:
    parameters = _parameters_of(local_sgd, fragments)
    return _by_name("outer.mean", [(outer, outer.mean) for outer in parameters if outer.mean is not None])


def _parameters_of(local_sgd: LocalSgd, fragments: list[int]) -> list[OuterParameter]:
    return [outer for fragment in fragments for outer in local_sgd.parameters_of(fragment)]


def _by_name(kind: str, pairs: list[tuple[OuterParameter, Tensor]]) -> Tensors:
    """Maps names to the tensors that all ranks of a replica hold together, the first of each name."""
    tensors: Tensors = {}
    for outer, tensor in pairs:
        tensors.setdefault(f"{kind}.{outer.inner.name}", outer.inner.distributed(tensor))
    return tensors

"""Compares copies of tensors that must stay bitwise identical on several ranks.

These are parameters and optimizer states on data-parallel axes that do not shard them, parameters
that tp does not split (norms, biases, replicated keys and values), and tied weights on the first
and last pipeline stage. All copies start equal and get the same updates. A difference is therefore
caused by a memory, processor or link fault, or by a model that draws random numbers or computes
differently on each rank. Tensors that only one rank holds (FULL_SHARD) cannot be compared.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import ParallelConfig
from parallel3d.diagnosis.nonfinite import place_in_model
from parallel3d.errors import ReplicaError
from parallel3d.launch.failure import any_ranks
from parallel3d.layers.replica_check import differ, fingerprint
from parallel3d.mesh import Axis
from parallel3d.sharding.optimizer_parts import LocalParameter

# (host of a rank, fingerprints of its differing tensors by tensor name)
Differences = tuple[str, Mapping[str, int]]
# Optimizer states: parameter -> name of the state -> tensor.
States = Mapping[torch.Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Copies:
    """Tensors, by their names in a checkpoint, that must be equal on all ranks of `axis`."""

    axis: Axis
    tensors: Mapping[str, Tensor]


def tensors_of(parameters: Sequence[LocalParameter], states: States) -> dict[str, Tensor]:
    """Returns parameters and their optimizer states, by their names in a checkpoint."""
    named: dict[str, Tensor] = {}
    for parameter in parameters:
        named[parameter.name] = parameter.local
        kinds = states.get(parameter.local, {})
        named |= {f"optimizer.{kind}.{parameter.name}": tensor for kind, tensor in kinds.items()}
    return named


def copies_of(parameters: Sequence[LocalParameter], states: States) -> list[Copies]:
    """Returns the tensors that must be equal along each axis of their mesh.

    The second copy of a tied weight (`is_copy`), on the last stage, is omitted.
    """
    repeated: dict[Axis, list[LocalParameter]] = {}
    for parameter in parameters:
        for name, axis in parameter.axes.items():
            if axis.size > 1 and name in parameter.repeated_over and not parameter.is_copy:
                repeated.setdefault(axis, []).append(parameter)
    return [Copies(axis, tensors_of(some, states)) for axis, some in repeated.items()]


def refuse_differences(
    copies: Sequence[Copies],
    parallel: ParallelConfig,
    device: torch.device,
    *,
    when: str,
    advice: str,
) -> None:
    """Raises ReplicaError on all ranks if copies differ. Collective.

    Each rank communicates 16 bytes per tensor and axis, and one number over all ranks. The error
    message begins with `when` and ends with `advice`.
    """
    if dist.get_world_size() == 1:
        return
    number_of = cache(fingerprint)  # A tensor can be replicated over several axes.
    found: dict[str, int] = {}
    for each in copies:
        own = torch.stack([number_of(tensor).to(device) for tensor in each.tensors.values()])
        differing = differ(own, each.axis).tolist()
        for name, number, differs in zip(each.tensors, own.tolist(), differing, strict=True):
            if differs:
                found[name] = number
    most_found = torch.tensor(len(found), device=device)
    dist.all_reduce(most_found, op=dist.ReduceOp.MAX)
    if not most_found.item():
        return
    everyone: list[Differences] = [(socket.gethostname(), found)] * dist.get_world_size()
    dist.all_gather_object(everyone, everyone[0])
    raise ReplicaError(f"{when}: {_describe(everyone, parallel)}; {advice}")


def _describe(everyone: Sequence[Differences], parallel: ParallelConfig) -> str:
    """Names the tensor that probably went wrong first, and its ranks.

    A wrong weight affects the gradients of all earlier layers, so this is the last differing tensor
    in the model. Parameters take precedence over optimizer states.
    """
    names = {name for _, found in everyone for name in found}
    name = max(sorted(names), key=lambda name: (name[:10] != "optimizer.", place_in_model(name)))
    held = {rank: found[name] for rank, (_, found) in enumerate(everyone) if name in found}
    (usual, most), (_, second), *_ = Counter(held.values()).most_common()
    is_known = most > second
    same = [rank for rank, number in held.items() if number == usual]
    odd = [rank for rank in held if not is_known or rank not in same]
    places = [f"rank {rank}: {everyone[rank][0]}, {parallel.coordinates(rank)}" for rank in odd[:4]]
    where = f"{any_ranks(odd)} ({'; '.join(places)})"
    if is_known:
        return f"{name} on {where} differs from {any_ranks(same)}"
    return f"{name} differs between {where}; one of them is wrong"

"""Compares copies of tensors that must stay bitwise identical on several ranks.

These are parameters and optimizer states on data-parallel axes that do not shard them, parameters
that tp does not split (norms, biases, replicated keys and values), and tied weights at both ends of
a pipeline. All copies start equal and add the same sums. A difference is therefore a fault of
memory, processor, link, or a model that draws or computes differently on each rank. Tensors that no
other rank holds, such as all that FULL_SHARD shards, cannot be compared.
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

# (host of a rank, fingerprints of its differing tensors by name)
Differences = tuple[str, Mapping[str, int]]
# Optimizer states of each parameter by name.
States = Mapping[torch.Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Copies:
    """Tensors by their names in a checkpoint. All ranks of `axis` must hold equal copies."""

    axis: Axis
    tensors: Mapping[str, Tensor]


def tensors_of(parameters: Sequence[LocalParameter], states: States) -> dict[str, Tensor]:
    """Returns parameters and their optimizer states by name."""
    named: dict[str, Tensor] = {}
    for parameter in parameters:
        named[parameter.name] = parameter.local
        kinds = states.get(parameter.local, {})
        named |= {f"optimizer.{kind}.{parameter.name}": tensor for kind, tensor in kinds.items()}
    return named


def copies_of(
    parameters: Sequence[LocalParameter], states: States, axes: Mapping[str, Axis]
) -> list[Copies]:
    """Returns the tensors that must be equal along each axis of the mesh.

    A tied weight that this rank holds twice is listed once, as its first copy.
    """
    found = []
    for name, axis in axes.items():
        repeated = [p for p in parameters if name in p.repeated_over and not p.is_copy]
        if axis.size > 1 and repeated:
            found.append(Copies(axis, tensors_of(repeated, states)))
    return found


def refuse_differences(
    copies: Sequence[Copies],
    parallel: ParallelConfig,
    device: torch.device,
    *,
    when: str,
    advice: str,
) -> None:
    """Raises ReplicaError on all ranks if copies differ. Collective.

    Each rank reads every tensor once, sends 16 bytes of it over an axis and one number over all
    ranks. `when` begins the message, and `advice` ends it.
    """
    if dist.get_world_size() == 1:
        return
    number_of = cache(fingerprint)  # Several axes can repeat the same tensor.
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
    """Names the tensor that differed first, and its ranks.

    A wrong weight spreads to all earlier layers through its gradients, so the last differing tensor
    in the model was the first to go wrong.
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

"""Compares tensors that several ranks hold, each for itself, and that must stay the same to the bit
on all of them.

They are a replica's parameters and optimizer states, on each axis of the data dimension that does
not split them, the parameters that tp does not split (norms, biases, keys and values of more ranks
than heads), and a tied weight at both ends of a pipeline. Each gets the same values and adds the
same sums, so that a difference is a fault: of memory, of a processor, of a link, or of a program
that draws or computes on each rank for itself. What no other rank holds, as all that FULL_SHARD
splits, cannot be compared with anything.
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

# the host of a rank, and the fingerprints of its tensors that differ by their names
Differences = tuple[str, Mapping[str, int]]
# the optimizer states of each parameter by their names
States = Mapping[torch.Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Copies:
    """Tensors of this rank by their names in a checkpoint, of which every rank of an axis has an
    equal copy."""

    axis: Axis
    tensors: Mapping[str, Tensor]


def tensors_of(parameters: Sequence[LocalParameter], states: States) -> dict[str, Tensor]:
    """Returns some parameters and their optimizer states by their names."""
    named: dict[str, Tensor] = {}
    for parameter in parameters:
        named[parameter.name] = parameter.local
        kinds = states.get(parameter.local, {})
        named |= {f"optimizer.{kind}.{parameter.name}": tensor for kind, tensor in kinds.items()}
    return named


def copies_of(
    parameters: Sequence[LocalParameter], states: States, axes: Mapping[str, Axis]
) -> list[Copies]:
    """Returns what every axis of the mesh must hold alike; of a weight that this rank has twice,
    the first."""
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
    """Raises ReplicaError, on all ranks alike, if copies differ: it names the tensor and the ranks.
    Every rank calls it. A rank reads each tensor once, and sends 16 bytes of it over an axis and
    one number over all ranks."""
    if dist.get_world_size() == 1:
        return
    number_of = cache(fingerprint)  # of a tensor that several axes repeat
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
    """Names the tensor that went wrong first and its ranks. A wrong weight spoils what comes before
    it in the model by its gradients, so the last one in the model was the first."""
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
        return f"{name} on {where} is not what it is on {any_ranks(same)}"
    return f"{name} is not the same on {where}, and one of them is wrong"

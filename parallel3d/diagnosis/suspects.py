"""Names where a loss or a gradient that is not finite comes from, in a step whose norm is not finite and in no other.

Gradients are looked at when they are summed. Over tp and pp the rank that made one is then known; over the data ranks
the parameter and the rank that holds the sum are, into which each of them gave a share. The loss is each rank's own, so
that a forward that goes wrong names its data rank; and a weight that is not finite names itself.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.failure import any_ranks
from parallel3d.pipeline.stage import FIRST_PARTS
from parallel3d.sharding.optimizer_parts import LocalParameter

_BEHIND_ALL_BLOCKS = 2**40


@dataclass(frozen=True)
class Evidence:
    """What one rank has found in its own numbers."""

    host: str
    has_bad_loss: bool
    bad_weight: str | None
    # The name and the place in the model of the last parameter whose gradient is not finite, which is the first one in
    # the backward, and how many others are before it.
    bad_gradient: tuple[tuple[int, int], str] | None
    others: int


def name_suspects(
    loss: Tensor,
    squares: Sequence[tuple[LocalParameter, Tensor]],
    parallel: ParallelConfig,
    *,
    replicas_train_apart: bool,
) -> str:
    """Returns a line that says on which ranks the loss, a weight or a gradient is not finite, the same on all of them.
    Every rank calls it, with its share of the loss, and with its parameters in the order of the model and the squared
    norms of their gradients."""
    everyone: list[Evidence] = [_own_evidence(loss, squares)] * dist.get_world_size()
    dist.all_gather_object(everyone, everyone[0])

    def at(ranks: Sequence[int]) -> str:
        first = ranks[0]
        place = f"{everyone[first].host}, {parallel.coordinates(first)}"
        return f"{any_ranks(ranks)} ({f'rank {first}: ' * (len(ranks) > 1)}{place})"

    lines = []
    if weight := next((found.bad_weight for found in everyone if found.bad_weight is not None), None):
        ranks = [rank for rank, found in enumerate(everyone) if found.bad_weight == weight]
        lines.append(f"the weight {weight} itself is not finite on {at(ranks)}")
    if losses := [rank for rank, found in enumerate(everyone) if found.has_bad_loss]:
        lines.append(f"the loss is not finite on {at(losses)}")
    if gradients := [found.bad_gradient for found in everyone if found.bad_gradient is not None]:
        first = max(gradients)
        ranks = [rank for rank, found in enumerate(everyone) if found.bad_gradient == first]
        line = f"the first gradient of the backward that is not finite is that of {first[1]} on {at(ranks)}"
        if others := max(everyone[rank].others for rank in ranks):
            line += f", and {others} more"
        summed = [each for each in range(len(everyone)) if _adds_to(parallel, ranks[0], each, replicas_train_apart)]
        if len(summed) > 1:
            line += f"; it is a sum, to which any of {any_ranks(summed)} may have given it"
        lines.append(line)
    return "; ".join(lines) or "no rank's own numbers are so, and their sum is"


def _own_evidence(loss: Tensor, squares: Sequence[tuple[LocalParameter, Tensor]]) -> Evidence:
    numbers = torch.stack([loss.double(), *(square for _, square in squares)])
    is_good_loss, *good = numbers.isfinite().tolist()
    bad = [
        ((place_in_model(parameter.name), at), parameter.name)
        for at, (parameter, _) in enumerate(squares)
        if not good[at]
    ]
    # A parameter that was stepped in the backward has dropped its gradient, and got what was wrong with it.
    unstepped = [parameter for parameter, _ in squares if parameter.local.grad is not None]
    bad_weights = [p.name for p in unstepped if not torch.linalg.vector_norm(p.local.detach().float()).isfinite()]
    return Evidence(
        host=socket.gethostname(),
        has_bad_loss=not is_good_loss,
        bad_weight=bad_weights[0] if bad_weights else None,
        bad_gradient=max(bad, default=None),
        others=max(0, len(bad) - 1),
    )


def place_in_model(name: str) -> int:
    """Returns where a parameter is in the whole model: the number of its block, or one before or behind all blocks."""
    block = re.match(r"layers\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return -1 if name.split(".")[0] in FIRST_PARTS else _BEHIND_ALL_BLOCKS


def _adds_to(parallel: ParallelConfig, rank: int, other: int, replicas_train_apart: bool) -> bool:
    """Returns whether the gradients of two ranks are summed: both are data ranks of one part of the model."""
    one, two = parallel.coordinates(rank), parallel.coordinates(other)
    return (one.pp, one.tp) == (two.pp, two.tp) and (not replicas_train_apart or one.dp_replicate == two.dp_replicate)

"""Names the source of a loss or a gradient that is not finite.

Gradients are checked after they are summed. Over tp and pp the rank that produced one is known;
over the data ranks only the parameter and the ranks that hold the sum. The loss is each rank's
own, so a wrong forward pass names its data rank. A weight that is not finite names itself.
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

_AFTER_ALL_BLOCKS = 2**40


@dataclass(frozen=True)
class NonFiniteReport:
    """The numbers of one rank that are not finite."""

    host: str
    has_bad_loss: bool
    bad_weight: str | None
    # Place in the model and name of the last parameter in the model whose gradient is not finite,
    # which is the first one in the backward pass.
    bad_gradient: tuple[int, int, str] | None
    others: int  # other parameters with such gradients; -1: there is not one


def describe_nonfinite(
    loss: Tensor,
    squares: Sequence[tuple[LocalParameter, Tensor]],
    parallel: ParallelConfig,
    *,
    replicas_train_apart: bool,
) -> str:
    """Returns a line, the same on all ranks, that names the ranks on which the loss, a weight or a
    gradient is not finite. Every rank calls it with its share of the loss, and its parameters in
    the order of the model with the squared norms of their gradients."""
    reports = [_own_report(loss, squares)] * dist.get_world_size()
    dist.all_gather_object(reports, reports[0])

    def place(ranks: Sequence[int]) -> str:
        first = ranks[0]
        name = f"rank {first}: " if len(ranks) > 1 else ""
        where = f"{reports[first].host}, {parallel.coordinates(first)}"
        return f"{any_ranks(ranks)} ({name}{where})"

    lines = []
    weights = [report.bad_weight for report in reports if report.bad_weight is not None]
    if weights:
        ranks = [rank for rank, report in enumerate(reports) if report.bad_weight == weights[0]]
        lines.append(f"the weight {weights[0]} itself is not finite on {place(ranks)}")
    ranks = [rank for rank, report in enumerate(reports) if report.has_bad_loss]
    if ranks:
        lines.append(f"the loss is not finite on {place(ranks)}")
    gradients = [report.bad_gradient for report in reports if report.bad_gradient is not None]
    if gradients:
        first = max(gradients)
        ranks = [rank for rank, report in enumerate(reports) if report.bad_gradient == first]
        line = (
            f"the first gradient of the backward that is not finite is that of {first[-1]} on "
            f"{place(ranks)}"
        )
        if others := reports[ranks[0]].others:
            line += f", and {others} more"
        summed = _summed_with(ranks[0], parallel, replicas_train_apart)
        if len(summed) > 1:
            line += f"; it is a sum, to which any of {any_ranks(summed)} may have given it"
        lines.append(line)
    return "; ".join(lines) or "no rank's own numbers are so, and their sum is"


def _own_report(loss: Tensor, squares: Sequence[tuple[LocalParameter, Tensor]]) -> NonFiniteReport:
    numbers = torch.stack([loss.double(), *(square for _, square in squares)])
    is_good_loss, *is_good = numbers.isfinite().tolist()
    bad, bad_weights = [], []
    for index, (parameter, _) in enumerate(squares):
        if not is_good[index]:
            bad.append((place_in_model(parameter.name), index, parameter.name))
        if not torch.linalg.vector_norm(parameter.local.detach().float()).isfinite():
            bad_weights.append(parameter.name)
    return NonFiniteReport(
        host=socket.gethostname(),
        has_bad_loss=not is_good_loss,
        bad_weight=bad_weights[0] if bad_weights else None,
        bad_gradient=max(bad, default=None),
        others=len(bad) - 1,
    )


def place_in_model(name: str) -> int:
    """Returns the number of a parameter's block, or a number before or after all blocks."""
    block = re.match(r"layers\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return -1 if name.split(".")[0] in FIRST_PARTS else _AFTER_ALL_BLOCKS


def _summed_with(rank: int, parallel: ParallelConfig, replicas_train_apart: bool) -> list[int]:
    """Returns the ranks whose gradients are summed with those of `rank`."""
    own, found = parallel.coordinates(rank), []
    for other in range(parallel.world_size):
        theirs = parallel.coordinates(other)
        is_replica = own.dp_replicate == theirs.dp_replicate or not replicas_train_apart
        if is_replica and (own.pp, own.tp) == (theirs.pp, theirs.tp):
            found.append(other)
    return found

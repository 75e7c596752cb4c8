"""Names the source of a loss or a gradient that is not finite.

Gradients are checked after they are summed. Over tp and pp the rank that produced one is known;
over the data ranks only the parameter and the ranks that hold the sum. The loss is each rank's
own, so a wrong forward pass names its data rank.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.failure import any_ranks
from parallel3d.mesh import DATA_ROLES, Role
from parallel3d.pipeline.stage import FIRST_PARTS
from parallel3d.sharding.optimizer_parts import LocalParameter

_AFTER_ALL_BLOCKS = 2**40


@dataclass(frozen=True)
class NonFiniteReport:
    """The numbers of one rank that are not finite."""

    host: str
    has_bad_loss: bool
    # Place in the model and name of the last parameter in the model whose gradient is not finite,
    # which is the first one in the backward pass.
    bad_gradient: tuple[int, int, str] | None


def describe_nonfinite(
    loss: Tensor,
    squares_of: Callable[[], Sequence[tuple[LocalParameter, Tensor]]],
    parallel: ParallelConfig,
    *,
    replicas_train_apart: bool,
) -> str:
    """Returns a line, the same on all ranks, that names the ranks on which the loss or a
    gradient is not finite. Every rank calls it with its share of the loss. `squares_of` returns its
    parameters in the order of the model with the squared norms of their gradients."""
    reports = [_own_report(loss, squares_of())] * dist.get_world_size()
    dist.all_gather_object(reports, reports[0])

    def place(is_bad: Callable[[NonFiniteReport], bool]) -> str:
        ranks = [rank for rank, report in enumerate(reports) if is_bad(report)]
        name = f"rank {ranks[0]}: " if len(ranks) > 1 else ""
        where = f"{reports[ranks[0]].host}, {parallel.coordinates(ranks[0])}"
        return f"{any_ranks(ranks)} ({name}{where})"

    lines = []
    if any(report.has_bad_loss for report in reports):
        lines.append(f"the loss is not finite on {place(lambda report: report.has_bad_loss)}")
    gradients = [report.bad_gradient for report in reports if report.bad_gradient is not None]
    if gradients:
        first = max(gradients)
        line = (
            f"the first gradient of the backward that is not finite is that of {first[-1]} on "
            f"{place(lambda report: report.bad_gradient == first)}"
        )
        rank = [report.bad_gradient for report in reports].index(first)
        summed = _summed_with(rank, parallel, replicas_train_apart)
        if len(summed) > 1:
            line += f"; it is a sum, to which any of {any_ranks(summed)} may have given it"
        lines.append(line)
    return "; ".join(lines) or "no rank's own numbers are so, and their sum is"


def _own_report(loss: Tensor, squares: Sequence[tuple[LocalParameter, Tensor]]) -> NonFiniteReport:
    bad = [
        (place_in_model(parameter.name), index, parameter.name)
        for index, (parameter, square) in enumerate(squares)
        if not square.isfinite()
    ]
    return NonFiniteReport(
        host=socket.gethostname(),
        has_bad_loss=not loss.isfinite(),
        bad_gradient=max(bad, default=None),
    )


def place_in_model(name: str) -> int:
    """Returns the number of a parameter's block, or a number before or after all blocks."""
    block = re.match(r"layers\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return -1 if name.split(".")[0] in FIRST_PARTS else _AFTER_ALL_BLOCKS


def _summed_with(rank: int, parallel: ParallelConfig, replicas_train_apart: bool) -> list[int]:
    """Returns the ranks whose gradients are summed with those of `rank`."""
    roles = (Role.SHARD_PARAMETERS,) if replicas_train_apart else DATA_ROLES
    first = dict.fromkeys(roles, 0)
    places = [parallel.coordinates(each)._replace(**first) for each in range(parallel.world_size)]
    return [other for other, place in enumerate(places) if place == places[rank]]

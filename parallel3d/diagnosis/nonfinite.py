"""Names the source of a non-finite loss or gradient.

Gradients are checked after they are summed. Over tp and pp, the rank that produced one is known.
Over the data-parallel ranks, only the parameter and the ranks that hold the sum are known. Each
rank has its own loss, so a wrong forward pass identifies its data-parallel rank.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import ParallelConfig
from parallel3d.launch.failure import any_ranks
from parallel3d.mesh import data_ranks
from parallel3d.pipeline.stage import FIRST_PARTS
from parallel3d.sharding.optimizer_parts import LocalParameter

_AFTER_ALL_BLOCKS = 2**40


@dataclass(frozen=True)
class NonFiniteReport:
    """Non-finite numbers of one rank."""

    host: str
    has_bad_loss: bool
    # (block, index, name) of the last parameter in the model with a non-finite gradient, which is
    # the first in the backward pass. None: all gradients are finite.
    bad_gradient: tuple[int, int, str] | None
    summed_with: list[int]  # Ranks that gradients are summed over.


def describe_nonfinite(
    loss: Tensor,
    parameters: Sequence[LocalParameter],
    parallel: ParallelConfig,
    mesh: DeviceMesh,
) -> str:
    """Names the ranks with a non-finite loss or gradient in a line that is equal on all ranks.
    Collective.

    Each rank passes its share of the loss and its parameters in the order of the model. `mesh`
    holds the ranks that train together.
    """
    bad = []
    for index, parameter in enumerate(parameters):
        gradient = parameter.local.grad
        # The norm can overflow although all elements are finite.
        if gradient is not None and not torch.linalg.vector_norm(gradient).isfinite():
            bad.append((place_in_model(parameter.name), index, parameter.name))
    own = NonFiniteReport(
        host=socket.gethostname(),
        has_bad_loss=not loss.isfinite(),
        bad_gradient=max(bad, default=None),
        summed_with=data_ranks(mesh),
    )
    reports = [own] * dist.get_world_size()
    dist.all_gather_object(reports, own)

    def place(ranks: list[int]) -> str:
        name = f"rank {ranks[0]}: " if len(ranks) > 1 else ""
        where = f"{reports[ranks[0]].host}, {parallel.coordinates(ranks[0])}"
        return f"{any_ranks(ranks)} ({name}{where})"

    lines = []
    bad_losses = [rank for rank, report in enumerate(reports) if report.has_bad_loss]
    if bad_losses:
        lines.append(f"the loss is not finite on {place(bad_losses)}")
    gradients = [report.bad_gradient for report in reports]
    first = max(filter(None, gradients), default=None)
    if first is not None:
        ranks = [rank for rank, gradient in enumerate(gradients) if gradient == first]
        line = (
            f"the first non-finite gradient of the backward pass is that of {first[-1]} on "
            f"{place(ranks)}"
        )
        summed = reports[ranks[0]].summed_with
        if len(summed) > 1:
            line += f"; it is a sum, so any of {any_ranks(summed)} may have caused it"
        lines.append(line)
    return "; ".join(lines) or "only a sum over ranks is not finite"


def place_in_model(name: str) -> int:
    """Returns the index of a parameter's block, or a number before or after all blocks."""
    block = re.match(r"layers\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return -1 if name.split(".")[0] in FIRST_PARTS else _AFTER_ALL_BLOCKS

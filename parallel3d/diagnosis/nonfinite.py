"""Names the source of a loss or a gradient that is not finite.

Gradients are checked after they are summed. Over tp and pp the rank that produced one is known;
over the data ranks only the parameter and the ranks that hold the sum. The loss is each rank's
own, so a wrong forward pass names its data rank.
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
    """The numbers of one rank that are not finite."""

    host: str
    has_bad_loss: bool
    # Place in the model and name of the last parameter in the model whose gradient is not finite,
    # which is the first one in the backward pass.
    bad_gradient: tuple[int, int, str] | None
    summed_with: list[int]  # the ranks that gradients are summed over


def describe_nonfinite(
    loss: Tensor,
    parameters: Sequence[LocalParameter],
    parallel: ParallelConfig,
    mesh: DeviceMesh,
) -> str:
    """Returns a line, the same on all ranks, that names the ranks on which the loss or a
    gradient is not finite. Every rank calls it with its share of the loss and its parameters in the
    order of the model. `mesh` holds the ranks that train together."""
    bad = []
    for index, parameter in enumerate(parameters):
        gradient = parameter.local.grad
        # Finite numbers may have a norm that is not.
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
            f"the first gradient of the backward that is not finite is that of {first[-1]} on "
            f"{place(ranks)}"
        )
        summed = reports[ranks[0]].summed_with
        if len(summed) > 1:
            line += f"; it is a sum, to which any of {any_ranks(summed)} may have given it"
        lines.append(line)
    return "; ".join(lines) or "no rank's own numbers are so, and their sum is"


def place_in_model(name: str) -> int:
    """Returns the number of a parameter's block, or a number before or after all blocks."""
    block = re.match(r"layers\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return -1 if name.split(".")[0] in FIRST_PARTS else _AFTER_ALL_BLOCKS

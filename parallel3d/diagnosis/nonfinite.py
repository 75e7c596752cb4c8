"""Names the source of a non-finite loss or gradient.

Gradients are checked after they are summed over the data-parallel ranks. Their tp and pp ranks are
therefore known, but any of the data-parallel ranks may be the source. The loss is checked before it
is summed, so a non-finite loss also identifies the data-parallel rank.
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
from parallel3d.sharding.optimizer_parts import LocalParameter

_AFTER_ALL_BLOCKS = 2**40


@dataclass(frozen=True)
class NonFiniteReport:
    """Non-finite loss and gradients of one rank."""

    host: str
    has_bad_loss: bool
    # (block index, parameter index, name) of the last parameter in model order with a non-finite
    # gradient, which is the first in the backward pass. None: all gradients are finite.
    bad_gradient: tuple[int, int, str] | None
    summed_with: list[int]  # Ranks over which gradients are summed.


def describe_nonfinite(
    loss: Tensor,
    parameters: Sequence[LocalParameter],
    parallel: ParallelConfig,
    mesh: DeviceMesh,
) -> str:
    """Describes which ranks have a non-finite loss or gradient. Collective.

    Returns the same line on all ranks. Each rank passes its share of the loss and its parameters in
    model order. Gradients are summed over the data-parallel axes of `mesh`.
    """
    bad = []
    for index, parameter in enumerate(parameters):
        gradient = parameter.local.grad
        # The norm is also non-finite if the sum of squares overflows.
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
    block = re.search(r"\.(\d+)\.", name)
    if block is not None:
        return int(block[1])
    return -1 if re.search("embed|wte|wpe", name) else _AFTER_ALL_BLOCKS

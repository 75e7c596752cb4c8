"""Gradients after the backward: partial ones are summed, and the global norm is taken.

Everything here works on plain tensors, this rank's part of each parameter, which are also what the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis
from parallel3d.sharding.parts import LocalParameter
from parallel3d.torch_private import norms


class GradientSync:
    """Completes the gradients that the backward left partial: over tp, and between the two ends of the pipeline."""

    def __init__(
        self, parameters: Sequence[LocalParameter], mesh: DeviceMesh, tied: frozenset[str], ends: tuple[int, int]
    ) -> None:
        """`tied` has the names of the parameters that the model uses twice, `ends` the pipeline ranks that hold the
        first and the last stage."""
        self._tp = Axis.of(mesh["tp"])
        self._partial = [p for p in parameters if p.spec.partial_gradient and self._tp.size > 1]
        self._ends = _pipeline_ends(mesh["pp"], ends) if tied else None
        self._tied = [p for p in parameters if p.name in tied] if self._ends else []
        # A rank that is both ends, as on a V, has the tied weight twice; a single stage has it once.
        is_one_rank = ends[0] == ends[1]
        named = [[p for p in parameters if p.name == name] for name in tied] if is_one_rank else []
        self._pairs = [pair for pair in named if len(pair) == 2]

    def complete(self) -> None:
        """Sums the gradients: one all-reduce over tp of the norms' weights (with sequence parallelism), and one of each
        tied weight between the first and the last pipeline rank."""
        if self._partial:
            gradients = [_gradient(p) for p in self._partial]
            summed = all_reduce(torch.cat([g.flatten() for g in gradients]), self._tp)
            for gradient, total in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        for parameter in self._tied:
            dist.all_reduce(_gradient(parameter), group=self._ends)
        for first, second in self._pairs:
            _gradient(second).copy_(_gradient(first).add_(_gradient(second)))


def squared_norm(parameters: Sequence[LocalParameter], axes: Mapping[str, Axis]) -> Tensor:
    """Returns this rank's share of the squared norm of the whole gradient, a float64 scalar. The sum of the shares over
    all ranks of the mesh is the squared norm, each parameter counted once."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.is_copy:
            by_copies.setdefault(parameter.copies(axes), []).append(_gradient(parameter))
    shares = [_sum_of_squares(gradients) / copies for copies, gradients in by_copies.items()]
    return sum(shares, torch.zeros((), dtype=torch.float64))


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    # The norms are float32 at least, because torch's own total norm of bf16 gradients would be rounded to bf16.
    each = norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(each)).double().square()


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.local.grad
    assert gradient is not None, f"{parameter.name} has no gradient"
    return gradient


def _pipeline_ends(pp: DeviceMesh, ends: tuple[int, int]) -> dist.ProcessGroup | None:
    """Returns the group of this pipeline's two end ranks on these ranks, and None elsewhere or if they are one rank."""
    if ends[0] == ends[1] or pp.get_local_rank() not in ends:
        return None
    ranks = dist.get_process_group_ranks(pp.get_group())
    group = dist.new_group([ranks[end] for end in ends], use_local_synchronization=True, group_desc="pipeline_ends")
    assert isinstance(group, dist.ProcessGroup)
    return group

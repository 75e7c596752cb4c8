"""Gradients after the backward: what is still partial is summed, the global norm taken, the norm clipped.

All of it works on plain tensors, this rank's part of each parameter, which are also what the optimizer steps.
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
        """`tied`: the names of the parameters that the model uses twice; `ends`: the pipeline ranks that hold the first
        and the last stage."""
        self._tp = Axis.of(mesh["tp"])
        self._partial = [p for p in parameters if p.spec.partial_gradient and self._tp.size > 1]
        self._ends = _pipeline_ends(mesh["pp"], ends) if tied else None
        self._tied = [p for p in parameters if p.name in tied] if self._ends else []
        # Where both ends are one rank, as in a V, it has the weight twice; a single stage has it once.
        is_one_rank = ends[0] == ends[1]
        self._pairs = [pair for name in tied if len(pair := _named(parameters, name)) == 2] if is_one_rank else []

    def complete(self) -> None:
        """Sends one all-reduce over tp of the norms' weights (with sequence parallelism), and one of each tied weight
        between the first and the last pipeline rank."""
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
    """This rank's share of the squared norm of the whole gradient, float64: summed over all ranks of the mesh it is the
    squared norm, each parameter counted once."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.is_copy:
            by_copies.setdefault(parameter.copies(axes), []).append(_gradient(parameter))
    shares = [_sum_of_squares(gradients) / copies for copies, gradients in by_copies.items()]
    return sum(shares, torch.zeros((), dtype=torch.float64))


def sum_over_mesh(x: Tensor, axes: Mapping[str, Axis]) -> Tensor:
    """The sum of `x` over all ranks: axis by axis, because on gloo a group of many ranks is slow."""
    for axis in axes.values():
        x = all_reduce(x, axis)
    return x


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    # In float32 at least: torch's own total norm would round to bf16 for such gradients.
    each = norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(each)).double().square()


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.local.grad
    assert gradient is not None, f"{parameter.name} has no gradient"
    return gradient


def _named(parameters: Sequence[LocalParameter], name: str) -> list[LocalParameter]:
    return [parameter for parameter in parameters if parameter.name == name]


def _pipeline_ends(pp: DeviceMesh, ends: tuple[int, int]) -> dist.ProcessGroup | None:
    """The group of the ranks of this pipeline's ends, on those two; None elsewhere or where they are one."""
    if ends[0] == ends[1] or pp.get_local_rank() not in ends:
        return None
    ranks = dist.get_process_group_ranks(pp.get_group())
    group = dist.new_group([ranks[end] for end in ends], use_local_synchronization=True, group_desc="pipeline_ends")
    assert isinstance(group, dist.ProcessGroup)
    return group

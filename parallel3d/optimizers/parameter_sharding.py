"""How a parameter's part lies in the whole: over which axes each dim is split, and where the part begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis
from parallel3d.sharding.parts import LocalParameter


class SubMatrix(NamedTuple):
    """A part of a matrix."""

    first_row: int
    first_column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, matrix: Tensor) -> Tensor:
        """A view of that part."""
        return matrix[self.first_row : self.first_row + self.rows, self.first_column : self.first_column + self.columns]


class RankOf(NamedTuple):
    """A rank of an axis, of so many."""

    rank: int
    ranks: int


def sub_matrix_of(shape: Sequence[int], dim: int | None, tp: RankOf, shard: RankOf) -> SubMatrix:
    """The part of a matrix of `shape` whose `dim` is split over tp (evenly; None: it is whole on each rank), and what a
    tp rank has over dp_shard by rows, each ceil(rows / ranks) but for the last ones. Where there is nothing left it has
    no rows."""
    rows, columns = shape
    first_row = first_column = 0
    if dim == 0:
        rows //= tp.ranks
        first_row = tp.rank * rows
    elif dim == 1:
        columns //= tp.ranks
        first_column = tp.rank * columns
    each = -(-rows // shard.ranks)
    skipped = min(shard.rank * each, rows)
    return SubMatrix(first_row + skipped, first_column, min(each, rows - skipped), columns)


@dataclass(frozen=True)
class ParameterSharding:
    """The axes that split each dim of a parameter. An axis splits one dim at most, a dim may be split by several."""

    elements: int  # of the whole
    axes: dict[str, Axis]  # all that split it, by name
    dims: dict[str, int]  # which dim each splits

    @classmethod
    def of(cls, parameter: LocalParameter) -> ParameterSharding:
        axes, dims = {}, {}
        tensor = parameter.distributed(parameter.local.detach())
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names
            assert names is not None
            for name, placement in zip(names, tensor.placements, strict=True):
                axis = Axis.of(tensor.device_mesh[name])
                if axis.size > 1 and not placement.is_replicate():
                    axes[name], dims[name] = axis, placement.dim  # type: ignore[attr-defined]  # a shard's
        return cls(math.prod(parameter.spec.shape), axes, dims)

    @property
    def part_elements(self) -> float:
        """Of a rank's part, on average: the same on all ranks."""
        return self.elements / math.prod(axis.size for axis in self.axes.values())

    def along(self, dim: int) -> dict[str, Axis]:
        """Those that split `dim`, which is not negative."""
        return {name: axis for name, axis in self.axes.items() if self.dims[name] == dim}


def without_dim(parameter: LocalParameter, dim: int, local: Tensor) -> Tensor:
    """A statistic of a parameter over `dim` (not negative), of which `local` [..., 1, ...] is this rank's part, as the
    tensor that all ranks hold together: split as the parameter is, but for that dim."""
    tensor = parameter.distributed(parameter.local.detach())
    if not isinstance(tensor, DTensor):
        return local
    shape = torch.Size(1 if index == dim else size for index, size in enumerate(tensor.shape))
    placements = [
        placement if placement.is_replicate() or placement.dim != dim else Replicate()  # type: ignore[attr-defined]
        for placement in tensor.placements
    ]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


class Sums:
    """Sums over axes, many at once: each is asked for by `add`, and `finish` sends one all-reduce an axis."""

    def __init__(self) -> None:
        self._axes: dict[str, Axis] = {}
        self._wanted: dict[str, list[Tensor]] = {}

    def add(self, x: Tensor, axes: dict[str, Axis]) -> Tensor:
        """`x`, which `finish` overwrites by its sum over `axes`; contiguous, alike on all of their ranks."""
        for name, axis in axes.items():
            self._axes[name] = axis
            self._wanted.setdefault(name, []).append(x)
        return x

    def finish(self) -> None:
        for name in sorted(self._axes):  # in the same order on all ranks
            parts = self._wanted[name]
            total = all_reduce(torch.cat([part.flatten() for part in parts]), self._axes[name])
            for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))
        self._axes.clear()
        self._wanted.clear()

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
from parallel3d.row_split import shard_rows
from parallel3d.sharding.optimizer_parts import LocalParameter


class SubMatrix(NamedTuple):
    """A rectangle of a matrix."""

    first_row: int
    first_column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, matrix: Tensor) -> Tensor:
        """Returns a view of this rectangle."""
        return matrix[self.first_row : self.first_row + self.rows, self.first_column : self.first_column + self.columns]


class RankOf(NamedTuple):
    """A rank's place on an axis of `ranks` ranks."""

    rank: int
    ranks: int


def sub_matrix_of(shape: Sequence[int], dim: int | None, tp: RankOf, shard: RankOf) -> SubMatrix:
    """Returns the part of a matrix of `shape` that a rank holds. tp splits `dim` evenly (None: every tp rank has the
    whole), and dp_shard splits the rows of that; the part may have no rows."""
    rows, columns = shape
    first_row = first_column = 0
    if dim == 0:
        rows //= tp.ranks
        first_row = tp.rank * rows
    elif dim == 1:
        columns //= tp.ranks
        first_column = tp.rank * columns
    own = shard_rows(rows, *shard)
    return SubMatrix(first_row + own.start, first_column, len(own), columns)


@dataclass(frozen=True)
class ParameterSharding:
    """The axes that split each dim of a parameter. An axis splits one dim at most; a dim may be split by several."""

    elements: int  # the whole parameter's
    axes: dict[str, Axis]  # all that split it, by name
    dims: dict[str, int]  # the dim that each of them splits

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
        """The elements of a rank's part on average, which is the same number on all ranks."""
        return self.elements / math.prod(axis.size for axis in self.axes.values())

    def along(self, dim: int) -> dict[str, Axis]:
        """Returns the axes that split `dim`, which is not negative."""
        return {name: axis for name, axis in self.axes.items() if self.dims[name] == dim}


def without_dim(parameter: LocalParameter, dim: int, local: Tensor) -> Tensor:
    """Returns a statistic of a parameter over `dim` (not negative) as the tensor that all ranks hold together. `local`
    [..., 1, ...] is this rank's part of it. The tensor is split as the parameter is, and whole along that dim."""
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
    """Sums over axes, many at once: `add` asks for one, and `finish` sends one all-reduce for each axis."""

    def __init__(self) -> None:
        self._axes: dict[str, Axis] = {}
        self._wanted: dict[str, list[Tensor]] = {}

    def add(self, x: Tensor, axes: dict[str, Axis]) -> Tensor:
        """Returns `x`, which `finish` overwrites by its sum over `axes`. It is contiguous, and of one shape on all of
        their ranks."""
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

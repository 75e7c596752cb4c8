"""Muon over sharded parameters: momentum whose matrix is made nearly orthogonal before it is stepped along.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025, "Muon is scalable for LLM training", arXiv
2502.16982, for the rate's adjustment, weight decay and dividing the work. The arithmetic is that of torch.optim.Muon:
the update of a sharded matrix is the one that the whole matrix has in one process, to the bit.

Every rank of a stage becomes the owner of some matrices, by their cost. One all-to-all sends each part to its matrix's
owner, and another each owner's result to all that hold a part. A rank sends and receives about as many elements as it
holds, where gathering every matrix on every rank would have it receive all of them. If replicas hold the same parts,
the owner takes the nearest and sends its result to all, so that replicas share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig
from parallel3d.mesh import Axis
from parallel3d.optimizers.rounding import apply
from parallel3d.optimizers.step_bytes import owners_of, rounds
from parallel3d.row_split import shard_rows
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.sharding.settings import joined_axis

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

STAGE_AXES = ("dp_replicate", "dp_shard", "tp")  # whose ranks hold parts of the same parameters
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan's: steep at zero, and near one from there on
_EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps matrices. The momentum is split as its parameter is. Two all-to-alls over the ranks of the stage gather
    what is to be made orthogonal and scatter the result; each sends this rank's part in `ns_dtype`. A learning rate
    schedule multiplies the run's rate by the group's `lr_ratio`. `state` must have "momentum_buffer" of each parameter
    before the first step. Every rank of `mesh` builds it, of a `resolved` config."""

    def __init__(self, matrices: Sequence[LocalParameter], mesh: DeviceMesh, config: OptimizerConfig) -> None:
        assert config.momentum is not None and config.nesterov is not None and config.ns_steps is not None
        assert config.lr_adjust is not None and config.ns_dtype is not None
        lr_ratio = 1.0 if config.muon_lr is None else config.muon_lr / config.lr
        defaults = {"lr": config.lr, "lr_ratio": lr_ratio, "weight_decay": config.weight_decay}
        super().__init__([matrix.local for matrix in matrices], defaults | {"momentum": config.momentum})
        self._matrices, self._nesterov = matrices, config.nesterov
        self._ns_steps, self._ns_dtype, self._lr_adjust = config.ns_steps, DTYPES[config.ns_dtype], config.lr_adjust
        self._stage = joined_axis(mesh, STAGE_AXES, "stage")
        self._tp, shards = mesh["tp"].size(), mesh["dp_shard"].size()
        self._shards = {matrix: 1 if "dp_shard" in matrix.part.repeated_over else shards for matrix in matrices}
        self._exchanges: dict[tuple[LocalParameter, ...], MatrixExchange] = {}  # one for each round

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        stepped = [matrix for matrix in self._matrices if matrix.local.grad is not None]
        for some in rounds(stepped, self._part_elements):
            self._step_together(tuple(some), group)

    def _part_elements(self, matrix: LocalParameter) -> float:
        ways = self._shards[matrix] * (1 if matrix.spec.dim is None else self._tp)
        return math.prod(matrix.spec.shape) / ways

    def _step_together(self, matrices: tuple[LocalParameter, ...], group: dict[str, Any]) -> None:
        """Steps some matrices. Each tensor is dropped as early as can be: together they are as large as the gradients
        of the matrices, and the iteration makes several of the size of each matrix that this rank owns."""
        if matrices not in self._exchanges:
            ranks, tp, shards = self._stage.size, self._tp, self._shards
            parts = [parts_of_ranks(m.spec.shape, m.spec.dim, ranks, tp, shards[m]) for m in matrices]
            shapes = [matrix.spec.shape for matrix in matrices]
            self._exchanges[matrices] = MatrixExchange(self._stage, parts, shapes)
        exchange = self._exchanges[matrices]
        wholes = exchange.gather([self._momentum(matrix, group["momentum"]) for matrix in matrices])
        for at in range(len(wholes)):
            wholes[at] = orthogonalize(wholes[at], self._ns_steps)
        like = self._matrices[0].local.new_empty(0, dtype=self._ns_dtype)
        updates = exchange.scatter(wholes, like)
        del wholes
        for matrix, update in zip(matrices, updates, strict=True):
            rate = group["lr"] * adjustment(self._lr_adjust, matrix.spec.shape)
            apply(matrix.local, update.float().mul_(rate), decay=group["lr"] * group["weight_decay"])

    def _momentum(self, matrix: LocalParameter, momentum: float) -> Tensor:
        """Moves the momentum buffer on; returns what is to be made orthogonal, this rank's part of it."""
        local = matrix.local
        assert local.grad is not None
        gradient = local.grad.float()
        state = self.state[local]["momentum_buffer"]
        buffer = state.float().lerp_(gradient, 1 - momentum)
        state.copy_(buffer)
        direction = gradient.lerp(buffer, momentum) if self._nesterov else buffer
        return direction.to(self._ns_dtype)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Takes a matrix [rows, columns] of singular value decomposition U S V^T and returns nearly U V^T, with singular
    values between about 0.7 and 1.2: `steps` of the quintic Newton-Schulz iteration (Jordan et al. 2024), in the dtype
    of `matrix`."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPSILON)  # the Frobenius norm is at least the largest singular value
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def adjustment(rule: str, shape: Sequence[int]) -> float:
    """Returns the factor of a matrix's rate. `original` is Jordan's sqrt(rows / columns), at least 1. `match_rms_adamw`
    is 0.2 sqrt(the longer side), which makes updates as large as AdamW's (arXiv 2502.16982, section 2.2)."""
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))


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


@lru_cache(maxsize=256)
def parts_of_ranks(shape: tuple[int, ...], dim: int | None, ranks: int, tp: int, shards: int) -> Sequence[SubMatrix]:
    """Returns the part of a matrix of `shape` that each of the ranks of a stage holds, tp innermost, then dp_shard. tp
    splits `dim` evenly (None: every tp rank has the whole), and `shards` data ranks split the rows of that; a part may
    have no rows. Nothing is sent, because all ranks are placed and cut alike."""
    rows, columns = shape
    own_rows, own_columns = rows // tp if dim == 0 else rows, columns // tp if dim == 1 else columns
    parts = []
    for rank in range(ranks):
        of_tp, own = rank % tp, shard_rows(own_rows, rank // tp % shards, shards)
        first_row, first_column = of_tp * own_rows * (dim == 0), of_tp * own_columns * (dim == 1)
        parts.append(SubMatrix(first_row + own.start, first_column, len(own), own_columns))
    return parts


class MatrixExchange:
    """How some matrices of `shapes` travel between the ranks of `stage`. `parts[matrix][rank]` is the part that a rank
    holds. The owner of a matrix gets the parts of the whole from its givers."""

    def __init__(self, stage: Axis, parts: Sequence[Sequence[SubMatrix]], shapes: Sequence[tuple[int, ...]]) -> None:
        self._stage, self._parts, self._shapes = stage, parts, shapes
        self._owned: list[list[int]] = [[] for _ in range(stage.size)]
        self._givers = []
        for matrix, owner in enumerate(owners_of(shapes, stage.size)):
            self._owned[owner].append(matrix)
            self._givers.append(nearest_holders(parts[matrix], owner, shapes[matrix]))

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Takes this rank's part of each matrix; returns the whole of each matrix that this rank owns."""
        if self._stage.group is None:
            return list(parts)
        me, own = self._stage.rank, self._owned[self._stage.rank]
        given = [[matrix for matrix in own if rank in self._givers[matrix]] for rank in range(self._stage.size)]
        sent = [[parts[matrix] for matrix in owned if me in self._givers[matrix]] for owned in self._owned]
        expected = [[self._parts[matrix][rank] for matrix in some] for rank, some in enumerate(given)]
        received = self._exchange(sent, expected, parts[0])
        wholes = {matrix: parts[0].new_empty(self._shapes[matrix]) for matrix in own}
        for rank, some in enumerate(given):
            for matrix, part in zip(some, received[rank], strict=True):
                self._parts[matrix][rank].of(wholes[matrix]).copy_(part)
        return list(wholes.values())

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Takes the whole of each matrix that this rank owns; returns its part of each matrix, of the dtype and device
        of `like`."""
        if self._stage.group is None:
            return list(wholes)
        me, own = self._stage.rank, self._owned[self._stage.rank]
        sent = [
            [self._parts[matrix][to].of(whole) for matrix, whole in zip(own, wholes, strict=True)]
            for to in range(self._stage.size)
        ]
        received = self._exchange(sent, [[self._parts[matrix][me] for matrix in some] for some in self._owned], like)
        parts: dict[int, Tensor] = {}
        for some, arrived in zip(self._owned, received, strict=True):
            parts |= dict(zip(some, arrived, strict=True))
        return [parts[matrix] for matrix in range(len(self._shapes))]

    def _exchange(self, sent: list[list[Tensor]], expected: list[list[SubMatrix]], like: Tensor) -> list[list[Tensor]]:
        """Runs an all-to-all: `sent[rank]` goes to each rank, and the parts `expected[rank]` come from it."""
        flat = torch.cat([part.reshape(-1) for to_rank in sent for part in to_rank] or [like.new_empty(0)])
        sizes = [sum(part.elements for part in from_rank) for from_rank in expected]
        out = flat.new_empty(sum(sizes))
        sent_sizes = [sum(part.numel() for part in to_rank) for to_rank in sent]
        dist.all_to_all_single(out, flat, sizes, sent_sizes, group=self._stage.group)
        received = []
        for chunk, parts in zip(out.split(sizes), expected, strict=True):
            pieces = chunk.split([part.elements for part in parts])
            received.append([piece.view(part.rows, part.columns) for piece, part in zip(pieces, parts, strict=True)])
        return received


def nearest_holders(parts: Sequence[SubMatrix], owner: int, shape: tuple[int, ...]) -> frozenset[int]:
    """Returns the ranks whose parts make the whole matrix. If several ranks hold the same part, the one nearest to the
    matrix's owner is taken."""
    holders: dict[SubMatrix, int] = {}
    for rank in sorted(range(len(parts)), key=lambda rank: abs(rank - owner)):
        if parts[rank].elements:
            holders.setdefault(parts[rank], rank)
    rows, columns = shape
    assert sum(part.elements for part in holders) == rows * columns, f"{list(holders)} are not all of {shape}"
    return frozenset(holders.values())

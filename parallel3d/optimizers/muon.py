"""Muon for sharded parameters: orthogonalizes the momentum of each matrix before the update.

The algorithm is from Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Learning rate
adjustment, weight decay and distribution follow Liu et al. 2025, arXiv 2502.16982. Updates of
sharded matrices are bitwise identical to those of torch.optim.Muon in one process.

Each matrix has an owner among the ranks of a stage, chosen to balance the cost. One all-to-all
sends shards to the owners, and a second one returns the results. So a rank sends and receives about
as many elements as it holds, fewer than with an all-gather of every matrix. If replicas hold the
same shards, the owner receives from the nearest and sends its result to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig
from parallel3d.layers.parameter import ParameterSpec
from parallel3d.mesh import DATA_ROLES, Axis, Role
from parallel3d.optimizers.rounds import ROUND_ELEMENTS, owners_of, runs
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.sharding.settings import joined_axis

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Axes whose ranks hold shards of the same parameters.
STAGE_ROLES = (*DATA_ROLES, Role.SPLIT_TENSORS)
# Jordan's coefficients of the quintic polynomial, which is steep at zero, then near one.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon optimizer for matrices, with momentum sharded like its parameters.

    A step processes the matrices in rounds. Each round sends shards in `ns_dtype` in two
    all-to-alls over the ranks of the stage. The trainer multiplies the scheduled learning rate by
    the group's `lr_ratio`. `state` must have "momentum_buffer" of each parameter before the first
    step. Every rank of `mesh` must build it. `config` must be `resolved`.
    """

    def __init__(
        self, matrices: Sequence[LocalParameter], mesh: DeviceMesh, config: OptimizerConfig
    ) -> None:
        assert config.ns_dtype is not None
        lr_ratio = 1.0
        if config.muon_lr is not None:
            lr_ratio = config.muon_lr / config.lr
        defaults = {
            "lr": config.lr,
            "lr_ratio": lr_ratio,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
        }
        super().__init__([matrix.local for matrix in matrices], defaults)
        self._config = config
        self._dtype = DTYPES[config.ns_dtype]
        stage = joined_axis(mesh, STAGE_ROLES, "stage")
        single: list[Matrix] = []
        for parameter in matrices:
            single += matrices_of(parameter, stage)
        self._rounds = []
        for some in runs(single, lambda each: each.mean_elements, most=ROUND_ELEMENTS):
            exchange = MatrixExchange(stage, [m.parts for m in some], [m.shape for m in some])
            self._rounds.append((some, exchange))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for matrices, exchange in self._rounds:
            self._step_together(matrices, exchange)

    def _step_together(self, matrices: list[Matrix], exchange: MatrixExchange) -> None:
        """Updates the matrices of one round.

        It frees tensors as early as possible, because together they are as large as the gradients
        of the matrices.
        """
        (group,) = self.param_groups
        momentum = group["momentum"]
        full = exchange.gather([self._momentum(matrix, momentum) for matrix in matrices])
        iterations = self._config.ns_steps or 0
        for number in full:
            full[number] = orthogonalize(full[number], iterations)
        like = matrices[0].parameter.local.new_empty(0, dtype=self._dtype)
        updates = exchange.scatter(full, like)
        del full
        decay = group["lr"] * group["weight_decay"]
        for number, matrix in enumerate(matrices):
            factor = adjustment(self._config.lr_adjust, matrix.shape)
            rate = group["lr"] * factor
            change = updates[number].float().mul_(rate)
            local = matrix.parameter.local.detach()[matrix.own]
            wide = local.float()  # Copies unless the parameter is float32.
            # Computed in float32, so that the new value is rounded only once.
            local.copy_(wide.mul_(1 - decay).sub_(change))

    def _momentum(self, matrix: Matrix, momentum: float) -> Tensor:
        """Updates the momentum buffer. Returns this rank's shard of the matrix to orthogonalize."""
        local = matrix.parameter.local
        assert local.grad is not None
        gradient = local.grad[matrix.own].float()
        state = self.state[local]["momentum_buffer"][matrix.own]
        buffer = state.float().lerp_(gradient, 1 - momentum)
        state.copy_(buffer)
        if self._config.nesterov:
            buffer = gradient.lerp(buffer, momentum)
        return buffer.to(self._dtype)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Returns approximately U V^T for a matrix [rows, columns] = U S V^T.

    The singular values of the result are between about 0.7 and 1.2. It runs `steps` quintic
    Newton-Schulz iterations (Jordan et al. 2024) in the dtype of `matrix`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    # The Frobenius norm bounds the largest singular value.
    x = x / x.norm().clamp(min=_EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        change = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, change, x, beta=a)
    return x.T if is_tall else x


def adjustment(rule: str | None, shape: Sequence[int]) -> float:
    """Returns the factor of the learning rate for a matrix.

    "original" is Jordan's sqrt(rows / columns), at least 1. "match_rms_adamw" is 0.2 sqrt(longer
    side), which makes updates as large as those of AdamW (arXiv 2502.16982, section 2.2).
    """
    rows, columns = shape
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class SubMatrix(NamedTuple):
    """Rectangle of a matrix."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def between(self, first: int, end: int) -> SubMatrix:
        """Returns the part within rows `first` to `end`, counted from `first`."""
        start = min(max(self.rows.start, first), end)
        stop = min(max(self.rows.stop, first), end)
        return SubMatrix(range(start - first, stop - first), self.columns)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def of(self, matrix: Tensor) -> Tensor:
        """Returns a view of this rectangle."""
        rows = matrix[self.rows.start : self.rows.stop]
        return rows[:, self.columns.start : self.columns.stop]


class Matrix(NamedTuple):
    """A matrix that Muon steps: a parameter, or one of the matrices stacked in it."""

    parameter: LocalParameter
    shape: tuple[int, int]
    parts: Sequence[SubMatrix]  # Part of the matrix that each rank of the stage holds.
    own: slice  # Rows of `parameter.local` that belong to the matrix.
    mean_elements: float  # Mean number of elements of a part.


def matrices_of(parameter: LocalParameter, stage: Axis) -> Iterator[Matrix]:
    """Yields the matrices of a parameter, given the axis of the ranks of its stage."""
    spec = parameter.spec
    shards = 1
    if Role.SHARD_PARAMETERS not in parameter.part.repeated_over:
        shards = parameter.axes[Role.SHARD_PARAMETERS].size
    tp = parameter.axes[Role.SPLIT_TENSORS].size
    boxes = parts_of_ranks(spec, stage.size, tp, shards)
    height = spec.shape[0] // spec.stacked
    held = boxes[stage.rank].rows
    for first in range(0, spec.shape[0], height):
        parts = [box.between(first, first + height) for box in boxes]
        own = parts[stage.rank].rows
        offset = first - held.start
        rows = slice(own.start + offset, own.stop + offset) if own else slice(0, 0)
        split = shards if spec.dim is None else shards * tp
        shape = (height, spec.shape[1])
        yield Matrix(
            parameter,
            shape,
            parts,
            rows,
            math.prod(shape) / split,
        )


def parts_of_ranks(spec: ParameterSpec, ranks: int, tp: int, shards: int) -> Sequence[SubMatrix]:
    """Returns the part of a matrix that each rank of a stage holds.

    Ranks are numbered with tp innermost, then dp_shard. `shards` DP ranks split the rows of a tp
    shard. Some parts may be empty. No communication is needed.
    """
    parts = []
    for rank in range(ranks):
        tp_axis = Axis(tp, rank % tp, None)
        shard_axis = Axis(shards, rank // tp % shards, None)
        rows, columns = spec.box(tp_axis, shard_axis)
        parts.append(SubMatrix(rows, columns))
    return parts


class Share(NamedTuple):
    """Part of a matrix that travels between its owner and a holder.

    `rank` is the peer. `matrix` is the index of the matrix in the round. If `is_given` is False,
    the part travels only from the owner to the holder.
    """

    rank: int
    matrix: int
    part: SubMatrix
    is_given: bool


class MatrixExchange:
    """Sends parts of matrices to their owners, and results back.

    `parts[matrix][rank]` is the part that a rank of `stage` holds.
    """

    def __init__(
        self,
        stage: Axis,
        parts: Sequence[Sequence[SubMatrix]],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._stage = stage
        self._shapes = shapes
        held: list[Share] = []
        owned: list[Share] = []
        for m, owner in enumerate(owners_of(shapes, stage.size)):
            givers = nearest_holders(parts[m], owner)
            shares = [Share(rank, m, part, rank in givers) for rank, part in enumerate(parts[m])]
            held.append(shares[stage.rank]._replace(rank=owner))
            if owner == stage.rank:
                owned += shares
        # Both ends order messages by rank, then by matrix.
        self._held = sorted(held)
        self._owned = sorted(owned)

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Sends this rank's parts to the owners. Returns its own full matrices, keyed by index."""
        if self._stage.group is None:
            return dict(enumerate(parts))
        sent = [share for share in self._held if share.is_given]
        received = [share for share in self._owned if share.is_given]
        pieces = [parts[share.matrix] for share in sent]
        owned = dict.fromkeys(share.matrix for share in received)
        full = {matrix: parts[0].new_empty(self._shapes[matrix]) for matrix in owned}
        for share, piece in self._all_to_all(sent, pieces, received, parts[0]):
            share.part.of(full[share.matrix]).copy_(piece)
        return full

    def scatter(self, full: Mapping[int, Tensor], like: Tensor) -> Mapping[int, Tensor]:
        """Sends results of the full matrices that this rank owns. Returns its part of each matrix.

        The parts have the dtype and device of `like`.
        """
        if self._stage.group is None:
            return full
        pieces = [share.part.of(full[share.matrix]) for share in self._owned]
        arrived = self._all_to_all(self._owned, pieces, self._held, like)
        return {share.matrix: piece for share, piece in arrived}

    def _all_to_all(
        self,
        sent: list[Share],
        pieces: list[Tensor],
        received: list[Share],
        like: Tensor,
    ) -> list[tuple[Share, Tensor]]:
        flat = torch.cat([like.new_empty(0), *(piece.flatten() for piece in pieces)])
        out_sizes = self._elements_by_rank(received)
        in_sizes = self._elements_by_rank(sent)
        out = flat.new_empty(sum(out_sizes))
        dist.all_to_all_single(out, flat, out_sizes, in_sizes, group=self._stage.group)
        arrived = out.split([share.part.elements for share in received])
        found = []
        for share, piece in zip(received, arrived, strict=True):
            found.append((share, piece.view(share.part.shape)))
        return found

    def _elements_by_rank(self, shares: list[Share]) -> list[int]:
        elements = [0] * self._stage.size
        for share in shares:
            elements[share.rank] += share.part.elements
        return elements


def nearest_holders(parts: Sequence[SubMatrix], owner: int) -> frozenset[int]:
    """Returns ranks whose parts together form the full matrix.

    If several ranks hold the same part, the one nearest to the owner is chosen.
    """
    holders: dict[SubMatrix, int] = {}
    for rank in sorted(range(len(parts)), key=lambda rank: abs(rank - owner)):
        part = parts[rank]
        if part.rows:
            holders.setdefault(part, rank)
    return frozenset(holders.values())

"""Gathers whole matrices out of the parts that ranks hold, each on one of those ranks, and scatters the results.

Every rank of a stage becomes the owner of some matrices, by their cost. `gather` sends each part to its matrix's owner,
and `scatter` sends each owner's result to all that hold a part: one all-to-all each. A rank sends and receives about as
many elements as it holds, where gathering every matrix on every rank would have it receive all of them. If replicas
hold the same parts, the owner takes the nearest and sends its result to all, so that replicas share the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.optimizers.assignment import owners_of
from parallel3d.optimizers.parameter_sharding import RankOf, SubMatrix, sub_matrix_of
from parallel3d.sharding.optimizer_parts import LocalParameter

STAGE_AXES = ("dp_replicate", "dp_shard", "tp")  # whose ranks hold parts of the same parameters


@dataclass(frozen=True)
class StageGroup:
    """The ranks of the mesh that have this rank's pipeline stages, in the order of STAGE_AXES."""

    size: int
    rank: int
    group: dist.ProcessGroup | None  # None if this rank is alone
    shards: int = 1  # of dp_shard
    tp: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh) -> StageGroup:
        """Returns this rank's group. Every rank of the mesh calls it: it may make a group."""
        axes = [mesh[name] for name in STAGE_AXES if mesh[name].size() > 1]
        split = mesh["dp_shard"].size(), mesh["tp"].size()
        if not axes:
            return cls(1, 0, None)
        if len(axes) == 1:
            return cls(axes[0].size(), axes[0].get_local_rank(), axes[0].get_group(), *split)
        ranks = mesh[STAGE_AXES].mesh.flatten().tolist()
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc="stage")
        assert isinstance(group, dist.ProcessGroup)
        return cls(len(ranks), dist.get_group_rank(group, dist.get_rank()), group, *split)

    def parts_of(self, matrices: Sequence[LocalParameter]) -> list[Sequence[SubMatrix]]:
        """Returns the part of each rank for each matrix. Nothing is sent, because all ranks are placed and cut
        alike."""
        cuts = [(m.spec.shape, m.spec.dim, "dp_shard" not in m.part.repeated_over) for m in matrices]
        parts = {cut: self._parts(*cut) for cut in dict.fromkeys(cuts)}
        return [parts[cut] for cut in cuts]

    def _parts(self, shape: tuple[int, ...], dim: int | None, is_split: bool) -> Sequence[SubMatrix]:
        def part(rank: int) -> SubMatrix:
            shard = RankOf(rank // self.tp % self.shards, self.shards) if is_split else RankOf(0, 1)
            return sub_matrix_of(shape, dim, RankOf(rank % self.tp, self.tp), shard)

        return [part(rank) for rank in range(self.size)]


@dataclass(frozen=True)
class MatrixExchange:
    """How some matrices travel. `parts[matrix][rank]` is the part that a rank of the group holds, `owners[matrix]` the
    rank that gets the whole, `givers[matrix]` the ranks that the owner gets the parts from."""

    stage: StageGroup
    parts: Sequence[Sequence[SubMatrix]]
    shapes: Sequence[tuple[int, ...]]
    owners: Sequence[int]
    givers: Sequence[frozenset[int]]

    @classmethod
    def of(
        cls, stage: StageGroup, parts: Sequence[Sequence[SubMatrix]], shapes: Sequence[tuple[int, ...]]
    ) -> MatrixExchange:
        owners = owners_of(shapes, stage.size)
        givers = [nearest_holders(parts[m], owner, shapes[m]) for m, owner in enumerate(owners)]
        return cls(stage, parts, shapes, owners, givers)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Takes this rank's part of each matrix; returns the whole of each matrix that this rank owns."""
        if self.stage.group is None:
            return list(parts)
        me, ranks = self.stage.rank, range(self.stage.size)
        given = [[matrix for matrix in self._owned_by(me) if rank in self.givers[matrix]] for rank in ranks]
        sent = [[parts[matrix] for matrix in self._owned_by(to) if me in self.givers[matrix]] for to in ranks]
        received = self._exchange(sent, [[self.parts[m][rank] for m in given[rank]] for rank in ranks], parts[0])
        wholes = {matrix: parts[0].new_empty(self.shapes[matrix]) for matrix in self._owned_by(me)}
        for rank in ranks:
            for matrix, part in zip(given[rank], received[rank], strict=True):
                self.parts[matrix][rank].of(wholes[matrix]).copy_(part)
        return list(wholes.values())

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Takes the whole of each matrix that this rank owns; returns its part of each matrix, of the dtype and device
        of `like`."""
        if self.stage.group is None:
            return list(wholes)
        me, ranks = self.stage.rank, range(self.stage.size)
        own = self._owned_by(me)
        sent = [[self.parts[matrix][to].of(whole) for matrix, whole in zip(own, wholes, strict=True)] for to in ranks]
        received = self._exchange(sent, [[self.parts[m][me] for m in self._owned_by(rank)] for rank in ranks], like)
        parts = {m: part for rank in ranks for m, part in zip(self._owned_by(rank), received[rank], strict=True)}
        return [parts[matrix] for matrix in range(len(self.owners))]

    def _owned_by(self, rank: int) -> Sequence[int]:
        return self._owned.get(rank, ())

    @cached_property
    def _owned(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for matrix, owner in enumerate(self.owners):
            found.setdefault(owner, []).append(matrix)
        return found

    def _exchange(self, sent: list[list[Tensor]], expected: list[list[SubMatrix]], like: Tensor) -> list[list[Tensor]]:
        """Runs an all-to-all: `sent[rank]` goes to each rank, and what is returned, as `expected[rank]`, comes from
        it."""
        flat = torch.cat([part.reshape(-1) for to_rank in sent for part in to_rank] or [like.new_empty(0)])
        sizes = [sum(part.elements for part in from_rank) for from_rank in expected]
        out = flat.new_empty(sum(sizes))
        sent_sizes = [sum(part.numel() for part in to_rank) for to_rank in sent]
        dist.all_to_all_single(out, flat, sizes, sent_sizes, group=self.stage.group)
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

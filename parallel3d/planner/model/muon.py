"""Matrices that Muon updates, and the temporary memory of a step. Muon updates them in rounds
(`optimizers.rounds`). The round with the most bytes sets the peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from parallel3d.optimizers.rounds import ROUND_ELEMENTS, owners_of, runs
from parallel3d.planner.model.parameters import expert_tables, hidden_tables
from parallel3d.planner.model.shapes import ModelShape


@dataclass(frozen=True)
class MuonMatrix:
    """A matrix sharded over the ranks of a stage.

    `parts` is the number of shards, `own` the elements on the first rank.
    """

    shape: tuple[int, int]
    parts: int
    own: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class MuonCosts:
    """Costs of Muon for the matrices of blocks. AdamW updates all other parameters."""

    state_bytes: int  # Bytes per element of the momentum.
    item_bytes: int  # Bytes per element in the all-to-all and in the iterations.
    iterations: int


@lru_cache(maxsize=256)
def muon_matrices(
    shape: ModelShape,
    tp: int,
    shards: int,
    ep: int,
    expert_shards: int,
    *,
    dense: bool = False,
) -> tuple[MuonMatrix, ...]:
    """Returns the matrices of a block in parameter order, with `shards` data-parallel shards, and
    `expert_shards` of the experts. `dense` selects a dense layer of an MoE model."""
    found: list[MuonMatrix] = []
    experts = None if dense else shape.experts
    linear = [[*hidden_tables(shape, size, dense=dense)] for size in (1, tp)]
    if experts is not None:
        for tables in linear:
            del tables[3]  # AdamW updates the router.
    for full, part in zip(*linear, strict=True):
        ranks = full.numel // part.numel  # Number of tp ranks that share the matrix.
        own = part.shard(shards) // part.times
        matrix = MuonMatrix((full.rows, full.columns), shards * ranks, own)
        found += [matrix] * full.times
    if experts is not None:
        for table in expert_tables(shape, ep):
            height = table.rows * ep // experts.count
            held = table.shard(expert_shards) // (table.columns * table.times)  # Rows.
            for first in range(0, experts.count * height, height):
                own = min(max(0, held - first), height) * table.columns
                matrix = MuonMatrix((height, table.columns), expert_shards * ep, own)
                found += [matrix] * table.times
    return tuple(found)


@lru_cache(maxsize=1024)
def muon_step_bytes(matrices: tuple[MuonMatrix, ...], *, ranks: int, item_bytes: int) -> float:
    """Returns the peak temporary bytes of a step on the first of a stage's `ranks` ranks.

    That rank owns the most expensive matrix of each round. The peak counts all of its shards in the
    dtype in which they are sent, and three float32 copies of the largest shard.
    """
    most = 0.0
    for some in runs(matrices, lambda each: each.numel / each.parts, most=ROUND_ELEMENTS):
        owners = owners_of([matrix.shape for matrix in some], ranks)
        owned = [matrix for matrix, owner in zip(some, owners, strict=True) if owner == 0]
        sent = item_bytes * sum(matrix.own for matrix in some)
        wide = 12 * max(matrix.own for matrix in some)
        full = item_bytes * sum(matrix.numel for matrix in owned)
        iterating = 2 * item_bytes * max(each.numel + min(each.shape) ** 2 for each in owned)
        if ranks == 1:
            most = max(most, sent + max(wide, iterating))
            continue
        # Bytes of the results for all ranks that hold a part.
        results = item_bytes * sum(matrix.numel * ranks / matrix.parts for matrix in owned)
        exchanging = sent + max(sent, full)
        scattering = results + max(results, sent)
        most = max(most, sent + wide, full + max(exchanging, iterating, scattering))
    return most

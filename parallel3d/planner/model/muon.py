"""The matrices that Muon steps, as the ranks of a stage divide them (`optimizers.rounds`), and the
bytes that its step makes. A step makes most in one of its rounds of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from parallel3d.optimizers.rounds import ROUND_ELEMENTS, owners_of, runs
from parallel3d.planner.model.parameters import hidden_tables
from parallel3d.planner.model.shapes import ModelShape


@dataclass(frozen=True)
class MuonMatrix:
    """A matrix that the ranks of a stage hold together: its full shape, the ranks that hold
    different parts of it, and this rank's numbers."""

    shape: tuple[int, int]
    parts: int
    own: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class MuonCosts:
    """How Muon steps its matrices. AdamW steps everything else."""

    state_bytes: int  # bytes of a number's momentum
    item_bytes: int  # in which matrices are sent and made orthogonal
    iterations: int


@lru_cache(maxsize=256)
def muon_matrices(shape: ModelShape, tp: int, shards: int) -> tuple[MuonMatrix, ...]:
    """Returns the matrices of a block in the order of their parameters; `shards` data ranks split a
    matrix's rows."""
    found: list[MuonMatrix] = []
    for full, part in zip(hidden_tables(shape, 1), hidden_tables(shape, tp), strict=True):
        ranks = full.numel // part.numel  # that tp splits it over
        own = part.shard(shards) // part.times
        matrix = MuonMatrix((full.rows, full.columns), shards * ranks, own)
        found += [matrix] * full.times
    return tuple(found)


@lru_cache(maxsize=1024)
def muon_step_bytes(matrices: tuple[MuonMatrix, ...], *, ranks: int, item_bytes: int) -> float:
    """Returns the most bytes on the first of the `ranks` of a stage, which owns the most costly
    matrix of each round. All of a rank's parts count as sent, and three float32 copies of the
    largest."""
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
        # for all that hold a part
        results = item_bytes * sum(matrix.numel * ranks / matrix.parts for matrix in owned)
        exchanging = sent + max(sent, full)
        scattering = results + max(results, sent)
        most = max(most, sent + wide, full + max(exchanging, iterating, scattering))
    return most

"""The matrices that Muon steps in a planned run, as `optimizers.step_bytes` takes them."""

from __future__ import annotations

from functools import lru_cache

from parallel3d.optimizers.step_bytes import MuonMatrix
from parallel3d.planner.model.parameters import Table, block_tables
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape


def hidden_tables(shape: ModelShape, tp: int) -> tuple[Table, ...]:
    """The tables of a block that Muon steps, on a tp rank."""
    return tuple(table for table in block_tables(shape, tp) if table.columns > 1)


def muon_shards(run: PlannedRun) -> int:
    """Returns the data ranks that split a matrix's rows."""
    return 1 if run.layout.strategy == "NO_SHARD" else run.layout.dp_shard


def muon_matrices(run: PlannedRun, blocks: int) -> tuple[MuonMatrix, ...]:
    """Returns the matrices of so many blocks, in the order of their parameters."""
    return _block_matrices(run.shape, run.layout.tp, muon_shards(run)) * blocks


@lru_cache(maxsize=256)
def _block_matrices(shape: ModelShape, tp: int, shards: int) -> tuple[MuonMatrix, ...]:
    """Returns the matrices of a block: q, k, v, o, then the MLP's."""
    found: list[MuonMatrix] = []
    for at, table in enumerate(hidden_tables(shape, tp)):
        own = table.shard(shards) // table.times
        if at in (2, 4):  # row-parallel: tp splits the columns
            matrix = MuonMatrix(shape.hidden, table.columns * tp, shards * tp, own)
        else:
            ranks = 1 if at == 1 and shape.kv_heads % tp else tp
            matrix = MuonMatrix(table.rows * ranks, shape.hidden, shards * ranks, own)
        found += [matrix] * table.times
    return tuple(found)

"""Bytes of parameters, gradients and optimizer states of a pipeline rank, by strategy.

A tp rank has P parameters, of which each of s data-parallel shards holds p = P / s. A parameter
takes e bytes in the compute dtype and m in the master dtype, its gradient r bytes in a reduction,
and its optimizer states k bytes:

                  replicated (s = 1 with NO_SHARD)             sharded
    parameters    e P, and m P / s if e < m                    m p
    gradients     m P                                          max(r, m) P until reduced, then m p
    optimizer     k P / s                                      k p
    unsharded     -                                            e P of a stage, or of a few units

If each microbatch reduces gradients, they take m p, and r for one unit, until the last reduction.
With `parallel.offload`, sharded states are on the CPU.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, reduce
from math import ceil
from operator import add
from typing import NamedTuple

from parallel3d.config.sharding_strategies import REPLICATED, frees_after_forward, usual_bucket_mib
from parallel3d.planner.model.muon import MuonMatrix, muon_matrices, muon_step_bytes
from parallel3d.planner.model.parameters import expert_numel, rank_numel
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import master_bytes

_BLOCK = StageSlice(layers=1)


class Unit(NamedTuple):
    """Parameters of a block or stage: unsharded, summed over padded data-parallel shards, and on
    the first of these shards. A tp rank has the experts of its ep rank, in shards of their own.
    """

    numel: int
    padded: int
    shard: int

    def plus(self, other: Unit) -> Unit:
        return Unit(*map(add, self, other))


class RankStates:
    """Parameters, gradients and optimizer states of one pipeline rank, with their element sizes."""

    def __init__(self, run: PlannedRun, rank: int) -> None:
        layout = run.layout
        self.run = run
        self.layout = layout
        self.item = int(run.item_bytes)
        self.master = master_bytes(run.precision)
        is_split = layout.replicas > 1 or layout.offload
        self.is_sharded = is_split and layout.strategy not in REPLICATED
        self.shards = layout.optimizer_shards
        self.reduces_each = self.is_sharded and layout.reduce == "microbatch"
        self.frees_forward = self.is_sharded and frees_after_forward(
            layout.strategy, layout.gather_cadence
        )
        self.reduce = layout.reduce_bytes
        self.summed = max(self.reduce, self.master)  # Of gradients of several microbatches.
        # Bytes per parameter of a shard for gradients after the last backward pass of their stage.
        self.reduced: float = self.master
        if layout.dp > layout.dp_shard and self.reduce != self.master:
            self.reduced += self.reduce  # The input of the all-reduce is kept, too.
        if run.offloads or not self.is_sharded:
            self.reduced = 0.0
        self.stages = run.stages_of(rank)
        self.parts = parts = tuple(part for part, _ in self.stages)
        self.splits = layout.splits
        self.block, self.experts, self.units, self.ends = _units(run.shape, parts, *self.splits)
        # Parameters in a bucket of replicated gradients, at least of the given size.
        least = 2**20 * (layout.bucket_mib or usual_bucket_mib(on_gpu=not run.on_cpu))
        self.bucket = ceil(least / self.master / self.block.numel) * self.block.numel

    def unsharded(self, stage: int) -> tuple[float, float]:
        """Returns the bytes of all-gathered parameters that a stage keeps until its last backward
        pass, and of those that it keeps until its next one."""
        bytes_ = float(self.item * self.units[stage].padded * self.is_sharded)
        if self.frees_forward:  # Only the parameters for the loss stay unsharded.
            bytes_ = float(self.item * self.ends[stage].padded * self.parts[stage].head)
        return (0.0, bytes_) if self.layout.gather_cadence == "microbatch" else (bytes_, 0.0)

    @cached_property
    def matrices(self) -> tuple[MuonMatrix, ...]:
        """The rank's matrices that Muon updates."""
        part = reduce(StageSlice.plus, self.parts)
        found = muon_matrices(self.run.shape, *self.splits) * (part.layers - part.dense)
        return found + muon_matrices(self.run.shape, *self.splits, dense=True) * part.dense

    @property
    def static_bytes(self) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer states that exist throughout a step."""
        if self.run.offloads:
            return 0.0, 0.0, 0.0
        numel = sum(unit.numel for unit in self.units)
        shard = sum(unit.shard for unit in self.units)
        optimizer = self.run.optimizer
        states = optimizer.state_bytes * shard
        if optimizer.muon is not None:
            hidden = sum(matrix.own for matrix in self.matrices)
            states -= (optimizer.state_bytes - optimizer.muon.state_bytes) * hidden
        masters: float = self.master * shard
        if self.is_sharded:
            return masters, 0.0, states
        if self.item == self.master:  # Matmuls use the master weights.
            masters = 0.0
        return self.item * numel + masters, self.master * numel, states

    @property
    def muon_step_bytes(self) -> float:
        """Temporary bytes of a Muon step, or 0. Other optimizers update one tensor at a time."""
        muon = self.run.optimizer.muon
        if muon is None:
            return 0.0
        ranks = self.layout.replicas * self.layout.tp
        return muon_step_bytes(self.matrices, ranks=ranks, item_bytes=muon.item_bytes)

    @cached_property
    def buckets(self) -> list[float]:
        """Bytes of replicated gradients copied for their reduction: two buckets of each stage."""
        is_copied = self.shards > 1 or self.reduce != self.master
        if self.is_sharded or self.layout.replicas == 1 or not is_copied:
            return [0.0] * len(self.parts)
        # A bucket is filled with full blocks. The last one may hold the embedding, too.
        block = self.block.numel
        bucket = other = self.bucket
        if self.experts.numel:  # Experts and the rest of their blocks are in buckets of their own.
            bucket, other = self.experts.numel, block
        sent = []
        for unit, end in zip(self.units, self.ends, strict=True):
            share = min((bucket + other + max(end.numel - block, 0)) / unit.numel, 1)
            copied = share * (unit.padded + (self.shards > 1) * unit.shard)
            sent.append(self.reduce * copied)
        return sent


@lru_cache(maxsize=4096)
def _units(
    shape: ModelShape,
    parts: tuple[StageSlice, ...],
    tp: int,
    shards: int,
    ep: int,
    expert_shards: int,
) -> tuple[Unit, Unit, list[Unit], list[Unit]]:
    """Counts the parameters of a block without routed experts, of the experts of a block, of each
    stage, and of each stage's embedding or head."""

    def unit(part: StageSlice) -> Unit:
        shard = rank_numel(shape, (part,), tp, shards=shards)
        return Unit(rank_numel(shape, (part,), tp), shard * shards, shard)

    def experts(layers: int) -> Unit:
        numel, shard = (expert_numel(shape, layers, ep, n) for n in (1, expert_shards))
        return Unit(numel, shard * expert_shards, shard)

    ends = []
    units = []
    blocks = [unit(_BLOCK)]
    for part in parts:
        has_table = part.embedding and (shape.tied_embeddings or not part.head)
        ends.append(unit(part._replace(layers=0, dense=0, embedding=has_table)))
        units.append(unit(part).plus(experts(part.layers - part.dense)))
        if part.dense:
            blocks.append(unit(_BLOCK._replace(dense=1)))
    own = experts(1)
    if shape.saved:  # Experts of Transformers are in the unit of their block.
        blocks[0] = blocks[0].plus(own)
        own = experts(0)
    return max(blocks), own, units, ends

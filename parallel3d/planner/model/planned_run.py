"""One training job for the planner: shape, cluster, layout and framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeVar

from parallel3d.config.recipe import ParallelConfig
from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.planner.hardware.cluster import Cluster, Group, axis_group
from parallel3d.planner.hardware.framework import FrameworkProfile
from parallel3d.planner.model.parameters import expert_numel, rank_numel, weights_of_block
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import OptimizerMemory
from parallel3d.schedules.blocks_per_stage import PartCosts, blocks_per_stage, sizes_between
from parallel3d.schedules.build import placement
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.shard_sizes import largest_shard

AnyLayout = TypeVar("AnyLayout", bound=ParallelConfig)


def varied(layout: AnyLayout, **changes: Any) -> AnyLayout:
    """Returns a changed copy of a layout, ten times as fast as `dataclasses.replace`."""
    made = object.__new__(type(layout))
    vars(made).update(vars(layout) | changes)
    return made


@dataclass(frozen=True, kw_only=True)
class RunLayout(ParallelConfig):
    """A layout with the number of microbatches and, for each kind of state, of shards.

    For a published run, `sharding` is None, and `schedule` and `recompute` may have values of other
    frameworks (recompute "op").
    """

    ep: int = 1
    microbatches: int = 1
    expert_tp: int = 1  # Number of ranks that share one expert.
    # Number of ranks that share one parameter (ZeRO-3), or 1 if it is unsharded.
    parameter_shards: int = 1
    gradient_shards: int = 1
    optimizer_shards: int = 1
    recompute_every: int = 1  # One block in this many is recomputed.

    @property
    def replicas(self) -> int:
        """Number of ranks that reduce the gradients of the same parameters."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Number of ranks in a stage that hold the same shard of the same experts."""
        return max(1, self.replicas * self.tp // (self.ep * self.expert_tp))

    def expert_shards(self, shards: int) -> int:
        """Returns the shards of an expert state if other states have `shards`: at most one per
        replica."""
        if shards == 1:
            return 1
        own_shards = shards * self.tp // (self.ep * self.expert_tp)
        return max(1, min(self.expert_replicas, own_shards))

    @property
    def splits(self) -> tuple[int, int, int, int]:
        """Ranks that divide weights, and data-parallel shards of optimizer states: first of all
        parameters except routed experts, then of these."""
        shards = self.optimizer_shards
        return self.tp, shards, self.ep, self.expert_shards(shards)

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a gradient in a reduction."""
        return 2 if self.reduce_dtype == "bf16" else 4


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A model shape on a cluster in a layout, run by a framework."""

    shape: ModelShape
    cluster: Cluster
    layout: RunLayout
    framework: FrameworkProfile
    seq_len: int
    precision: str = "bf16"
    # Training options that affect the memory of parallel3d, and the time of Muon.
    optimizer: OptimizerMemory = OptimizerMemory()
    imbalance: float = 1.0  # Rows of the fullest rank of experts relative to the mean, in memory.

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one cp rank."""
        return self.layout.microbatch_size * self.seq_len // self.layout.cp

    @property
    def routed_rows(self) -> float:
        """Rows that a rank's experts compute per microbatch with a balanced router."""
        experts = self.shape.experts
        layout = self.layout
        if experts is None:
            return 0.0
        return self.tokens * experts.per_token * layout.expert_tp / layout.tp

    @property
    def outside(self) -> float:
        """Elements of a [tokens, hidden] tensor on a rank outside attention and MLP."""
        elements = float(self.tokens * self.shape.hidden)
        if self.layout.sequence_parallel:
            return elements / self.layout.tp
        return elements

    def inner(self, rows: float) -> float:
        """Returns the elements of a hidden tensor in the MLPs of a rank per microbatch, if its
        routed experts compute `rows` rows."""
        tp = self.layout.tp
        experts = self.shape.experts
        if experts is None:
            return self.tokens * self.shape.ffn_hidden / tp
        shared = self.tokens * experts.shared_hidden / tp
        return shared + rows * experts.hidden / self.layout.expert_tp

    @property
    def rank_vocab(self) -> int:
        """Rows of the embedding table on a tp rank. Other frameworks pad the table to a multiple of
        128 tp rows, like Megatron-LM.
        """
        step = 1 if self.framework.is_parallel3d else 128
        return largest_shard(self.shape.vocab, step * self.layout.tp) * step

    @property
    def item_bytes(self) -> float:
        """Bytes per element of an activation."""
        return 4.0 if self.precision == "fp32" else 2.0

    def stage_parameters(self, part: StageSlice) -> int:
        """Counts the parameters of a slice of the model on tp rank 0, without routed experts."""
        repeats = not self.framework.is_parallel3d
        return rank_numel(self.shape, (part,), self.layout.tp, repeats_kv_heads=repeats)

    @property
    def fullest_rows(self) -> float:
        """Rows that the fullest rank's experts compute per microbatch."""
        return self.imbalance * self.routed_rows

    def stage_experts(self, part: StageSlice) -> int:
        """Counts the parameters of routed experts on a rank for a slice of the model."""
        experts = expert_numel(self.shape, part.layers - part.dense)
        return experts // (self.layout.ep * self.layout.expert_tp)

    def shard_numel(self, part: StageSlice, shards: int) -> float:
        """Returns the mean number of parameters on each of `shards` shards of a slice."""
        experts = self.stage_experts(part) / self.layout.expert_shards(shards)
        return self.stage_parameters(part) / shards + experts

    @property
    def offloads(self) -> bool:
        """True if a GPU run keeps parameters, gradients and optimizer states in CPU memory."""
        return self.layout.offload and not self.on_cpu

    @property
    def on_cpu(self) -> bool:
        """True if the devices are CPUs."""
        return self.cluster.device.is_cpu

    @property
    def sharding_rounds(self) -> tuple[int, int]:
        """Number of parameter all-gathers and of gradient reductions per step."""
        layout = self.layout
        if not self.framework.is_parallel3d:
            rounds = layout.microbatches if self.gathers_each_microbatch else 1
            return rounds, rounds
        rounds_of = {"microbatch": layout.microbatches, "step": 1}
        return rounds_of[layout.gather_cadence], rounds_of[layout.reduce]

    @property
    def gathers_each_microbatch(self) -> bool:
        """True if each microbatch all-gathers sharded parameters in both passes.

        In a pipeline, frameworks by default keep them from a stage's first microbatch to its last
        (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`; Llama 3, arXiv
        2407.21783, section 3.3.2).
        """
        if "microbatch" in (self.layout.gather_cadence, self.layout.reduce):
            return True
        if self.layout.pp > 1:
            return False
        return not self.framework.is_parallel3d or self.layout.microbatches == 1

    @property
    def global_batch_size(self) -> int:
        return self.layout.dp * self.layout.microbatch_size * self.layout.microbatches

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @cached_property
    def stages(self) -> tuple[StageSlice, ...]:
        """The stages in model order. Their layers are those of `stage_boundaries`, or else balanced
        by cost for parallel3d and by number for other frameworks.
        """
        layout = self.layout
        count = self.shape.layers
        if layout.stage_boundaries is not None:
            layers = tuple(sizes_between(layout.stage_boundaries, count))
        elif self.framework.is_parallel3d:
            layers = _cut_by_cost(self.shape, layout.stages, self.seq_len)
        else:
            layers = spread(count, layout.stages)
        return _slices(layers, self.shape.first_dense)

    @cached_property
    def ranks(self) -> tuple[StageSlice, ...]:
        """Layers, embedding and head of each pipeline rank, over all of its stages."""
        return _together(self.stages, self.placement)

    def stages_of(self, rank: int) -> tuple[tuple[StageSlice, int], ...]:
        """Returns a pipeline rank's stages, each with the index of its first block in the model."""
        return _by_rank(self.stages, self.placement)[rank]

    @property
    def schedule(self) -> ScheduleName:
        """The schedule, or zb_h1 for one that `schedules/` lacks (zb-1p, zb-2p)."""
        name = self.layout.schedule
        return name if name in SCHEDULES else "zb_h1"

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        layout = self.layout
        return placement(self.schedule, pp=layout.pp, virtual_stages=layout.virtual_stages)

    def group(self, size: int, stride: int) -> Group:
        """Returns the group of `size` ranks that are `stride` apart. tp is innermost."""
        return axis_group(self.cluster, size, stride, world=self.layout.world_size)


@lru_cache(maxsize=4096)
def _slices(layers: tuple[int, ...], dense: int) -> tuple[StageSlice, ...]:
    """Returns the stages of a model whose first `dense` layers have no experts."""
    last = len(layers) - 1
    stages = []
    for index, count in enumerate(layers):
        own_dense = min(count, dense)
        dense -= own_dense
        stage = StageSlice(
            layers=count,
            embedding=index == 0,
            head=index == last,
            dense=own_dense,
        )
        stages.append(stage)
    return tuple(stages)


@lru_cache(maxsize=4096)
def _by_rank(
    stages: tuple[StageSlice, ...], placement: tuple[int, ...]
) -> list[tuple[tuple[StageSlice, int], ...]]:
    ranks: list[tuple[tuple[StageSlice, int], ...]] = [()] * (max(placement) + 1)
    first = 0
    for stage, rank in zip(stages, placement, strict=True):
        ranks[rank] += ((stage, first),)
        first += stage.layers
    return ranks


@lru_cache(maxsize=4096)
def _together(stages: tuple[StageSlice, ...], placement: tuple[int, ...]) -> tuple[StageSlice, ...]:
    ranks = _by_rank(stages, placement)
    return tuple(reduce(StageSlice.plus, [stage for stage, _ in own]) for own in ranks)


@lru_cache(maxsize=4096)
def _cut_by_cost(shape: ModelShape, stages: int, seq_len: int) -> tuple[int, ...]:
    """Splits the layers as the trainer does, by the costs of `ModelConfig.part_costs`."""
    if shape.saved:  # For blocks of Transformers, it has the costs of a Llama.
        shape = replace(
            shape,
            experts=None,
            feed_forward="swiglu",
        )
    costs = PartCosts.of(
        block_weights=weights_of_block(shape),
        hidden=shape.hidden,
        query_hidden=shape.query_hidden,
        vocab=shape.vocab,
        seq_len=seq_len,
        dense_blocks=min(shape.first_dense, shape.layers - 1),
        dense_weights=weights_of_block(shape, dense=True),
    )
    return tuple(blocks_per_stage(shape.layers, stages, costs))


@lru_cache(maxsize=4096)
def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage. Middle stages take the remainder."""
    each, left = divmod(layers, stages)
    first = (stages - left) // 2
    last = stages - left - first
    return (each,) * first + (each + 1,) * left + (each,) * last


def from_config(
    parallel: ParallelConfig, global_batch_size: int, framework: FrameworkProfile
) -> RunLayout:
    """Adds microbatches and shard counts to the layout of a recipe or framework. Sharding is over
    dp_shard x cp ranks."""
    microbatches = global_batch_size // (parallel.dp * parallel.microbatch_size)
    usual_ep = parallel.tp if framework.is_parallel3d else 1
    split = parallel.shard_ranks
    strategy = parallel.strategy
    shards = 1 if strategy in REPLICATED else split
    beyond = {
        "sharding": strategy,
        "ep": parallel.ep or usual_ep,
        "recompute_every": parallel.recompute_every or 1,
        "gather": parallel.gather_cadence,
        "microbatches": microbatches,
        "parameter_shards": shards,
        "gradient_shards": shards,
        "optimizer_shards": 1 if strategy == "NO_SHARD" else split,
    }
    return varied(_USUAL, **(vars(parallel) | beyond))


_USUAL = RunLayout()

"""One training job as the planner sees it: a shape on a cluster in a layout, run by a framework."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from parallel3d.config.recipe import ParallelConfig
from parallel3d.config.sharding_strategies import REPLICATED, Cadence, usual_bucket_mib
from parallel3d.planner.hardware.cluster import Cluster, Group, axis_group
from parallel3d.planner.hardware.framework import FrameworkProfile
from parallel3d.planner.model.parameters import block_weights, expert_numel, rank_numel
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.planner.model.training import OptimizerMemory
from parallel3d.schedules.balance import PartCosts, balanced_cut, sizes_between
from parallel3d.schedules.build import placement
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.shard_sizes import largest_shard


@dataclass(frozen=True, kw_only=True)
class FrameworkLayout(ParallelConfig):
    """A layout with the axes that other frameworks have beside this project's: cp divides each
    sequence, ep a mixture's experts, over ranks of the same stage, which tp, cp and the data ranks
    are."""

    cp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


AnyLayout = TypeVar("AnyLayout", bound=ParallelConfig)


def varied(layout: AnyLayout, **changes: Any) -> AnyLayout:
    """Returns a layout with other values of some fields, as `dataclasses.replace` does in ten times
    as long: a search makes a hundred thousand of them."""
    made = object.__new__(type(layout))
    vars(made).update(vars(layout) | changes)
    return made


def other_axes(parallel: ParallelConfig) -> tuple[int, int]:
    """Returns cp and ep of a layout, 1 where it has no such axes."""
    if isinstance(parallel, FrameworkLayout):
        return (parallel.cp, parallel.ep)
    return (1, 1)


@dataclass(frozen=True, kw_only=True)
class RunLayout(FrameworkLayout):
    """A layout with its microbatches, and what published runs have beyond it: shards of each kind
    of state, schedules and a recompute ("op") of their own frameworks. `sharding` is None in a
    published run."""

    microbatches: int = 1
    expert_tp: int = 1  # ranks that divide one expert
    parameter_shards: int = 1  # ranks that one parameter is split over (ZeRO-3); 1: whole on each
    gradient_shards: int = 1
    optimizer_shards: int = 1
    recompute_every: int = 1  # one of so many blocks is recomputed

    @property
    def expert_replicas(self) -> int:
        """How many ranks of a stage hold the same part of the same experts."""
        ranks = self.dp * self.cp * self.tp
        return max(1, ranks // (self.ep * self.expert_tp))

    def expert_shards(self, shards: int) -> int:
        """Returns over how many ranks a state of the experts is split that others have on so
        many."""
        if shards == 1:
            return 1
        own_shards = shards * self.tp // (self.ep * self.expert_tp)
        return max(1, min(self.expert_replicas, own_shards))

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient's number on its way."""
        return 2 if self.reduce_dtype == "bf16" else 4


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A model's shape on a cluster in a layout, run by a framework."""

    shape: ModelShape
    cluster: Cluster
    layout: RunLayout
    framework: FrameworkProfile
    seq_len: int
    precision: str = "bf16"
    # what parallel3d keeps beside parameters and gradients
    optimizer: OptimizerMemory = OptimizerMemory()

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.layout.microbatch_size * self.seq_len // self.layout.cp

    @property
    def routed_rows(self) -> float:
        """Tokens of one microbatch that the experts on a rank compute, as often as a token has
        experts, where all have equally many."""
        experts = self.shape.experts
        layout = self.layout
        if experts is None:
            return 0.0
        return self.tokens * experts.per_token * layout.expert_tp / layout.tp

    @property
    def rank_vocab(self) -> int:
        """Rows of the token table on a tp rank: frameworks that pad go to a multiple of 128
        (Megatron's default)."""
        step = 1 if self.framework.is_parallel3d else 128
        return largest_shard(self.shape.vocab, step * self.layout.tp) * step

    @property
    def item_bytes(self) -> float:
        """Bytes of one element of an activation."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def runs_parallel3d(self) -> bool:
        """Whether this project's own framework runs it, in a layout of its own."""
        return self.framework.is_parallel3d and self.layout.sharding is not None

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one block on a tp rank, as the framework cuts it; of a mixture without its
        experts."""
        return self.stage_parameters(StageSlice(layers=1, embedding=False, head=False))

    def stage_parameters(self, part: StageSlice) -> int:
        """Counts the parameters of a slice of the model on a tp rank, as the framework cuts it."""
        return rank_numel(
            self.shape, (part,), self.layout.tp, repeats_kv_heads=not self.runs_parallel3d
        )

    def stage_experts(self, part: StageSlice) -> int:
        """Counts the parameters of the experts that a rank has of a slice of the model."""
        return expert_numel(self.shape, part) // (self.layout.ep * self.layout.expert_tp)

    @property
    def offloads(self) -> bool:
        """Whether parameters, gradients and optimizer states leave the device."""
        return self.layout.offload and not self.on_cpu

    @property
    def on_cpu(self) -> bool:
        """Whether operators are the CPU's, and no CUDA takes memory."""
        return self.cluster.device.is_cpu

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients of whole parameters that are sent in one go, at least."""
        usual = usual_bucket_mib(on_gpu=not self.on_cpu)
        return int((self.layout.bucket_mib or usual) * 2**20)

    @property
    def sharding_rounds(self) -> tuple[int, int]:
        """Returns how often a step gathers sharded parameters, and reduces their gradients."""
        layout = self.layout
        if not self.framework.is_parallel3d:
            rounds = layout.microbatches if self.gathers_each_microbatch else 1
            return rounds, rounds
        rounds_of = {"microbatch": layout.microbatches, "step": 1}
        return rounds_of[layout.gather_cadence], rounds_of[layout.reduce]

    @property
    def gathers_each_microbatch(self) -> bool:
        """Whether sharded parameters are freed and gathered again for every microbatch's forward
        and backward. Inside a pipeline frameworks keep them from a stage's first microbatch to its
        last (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`; Llama 3, arXiv
        2407.21783, section 3.3.2)."""
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

    @property
    def _layers(self) -> tuple[int, ...]:
        """Layers of each stage: as its framework cuts them, this project's own by what they cost
        (`balance`)."""
        layers = self.shape.layers
        layout = self.layout
        if layout.stage_boundaries is not None:
            return tuple(sizes_between(layout.stage_boundaries, layers))
        if self.framework.is_parallel3d:
            return _cut_by_cost(self.shape, layout.stages, self.seq_len)
        return spread(layers, layout.stages)

    @cached_property
    def stages(self) -> tuple[StageSlice, ...]:
        """The slices of the model, in its order."""
        return _slices(self._layers, self.shape.first_dense)

    @cached_property
    def ranks(self) -> tuple[StageSlice, ...]:
        """What each pipeline rank holds: all of its stages together."""
        return _together(self.stages, self.placement)

    def stages_of(self, rank: int) -> tuple[tuple[StageSlice, int], ...]:
        """Returns a pipeline rank's stages, each with the index of its first block in the whole
        model."""
        found = []
        first = 0
        for stage, holder in zip(self.stages, self.placement, strict=True):
            if holder == rank:
                found.append((stage, first))
            first += stage.layers
        return tuple(found)

    @property
    def schedule(self) -> ScheduleName:
        """The pipeline's schedule; for published ones that `schedules/` does not have (zb-1p and
        zb-2p) the one that is most like them."""
        name = self.layout.schedule
        return name if name in SCHEDULES else "zb_h1"

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        layout = self.layout
        return placement(self.schedule, pp=layout.pp, virtual_stages=layout.virtual_stages)

    def group(self, size: int, stride: int) -> Group:
        """Returns the group of so many ranks, `stride` apart: 1 over tp, tp over cp and the data
        ranks."""
        return axis_group(self.cluster, size, stride, world=self.layout.world_size)


@lru_cache(maxsize=4096)
def _slices(layers: tuple[int, ...], dense: int) -> tuple[StageSlice, ...]:
    """Returns the stages; the first `dense` layers of the model have no experts."""
    last = len(layers) - 1
    stages = []
    for index, count in enumerate(layers):
        own_dense = min(count, dense)
        dense -= own_dense
        stage = StageSlice(layers=count, embedding=index == 0, head=index == last, dense=own_dense)
        stages.append(stage)
    return tuple(stages)


@lru_cache(maxsize=4096)
def _together(stages: tuple[StageSlice, ...], placement: tuple[int, ...]) -> tuple[StageSlice, ...]:
    ranks = [StageSlice(layers=0, embedding=False, head=False)] * (max(placement) + 1)
    for stage, rank in zip(stages, placement, strict=True):
        ranks[rank] = ranks[rank].plus(stage)
    return tuple(ranks)


@lru_cache(maxsize=4096)
def _cut_by_cost(shape: ModelShape, stages: int, seq_len: int) -> tuple[int, ...]:
    """Cuts the layers as the trainer does, by `ModelConfig.part_costs`."""
    costs = PartCosts.of(
        block_weights=block_weights(shape),
        hidden=shape.hidden,
        query_hidden=shape.query_hidden,
        vocab=shape.vocab,
        seq_len=seq_len,
    )
    return tuple(balanced_cut(shape.layers, stages, costs))


@lru_cache(maxsize=4096)
def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage: even, what is left over in the middle."""
    each, left = divmod(layers, stages)
    first = (stages - left) // 2
    last = stages - left - first
    return (each,) * first + (each + 1,) * left + (each,) * last


def other_gather(pp: int, microbatches: int) -> Cadence:
    """Returns how often frameworks other than this project gather sharded parameters: once a step,
    which frees them between uses if the step has a single microbatch and no pipeline."""
    return "microbatch" if pp == microbatches == 1 else "step"


def from_config(
    parallel: ParallelConfig, global_batch_size: int, framework: FrameworkProfile
) -> RunLayout:
    """Returns the layout of a recipe, run by this project's own framework, or of a framework that
    has more axes: what is split over the data ranks is split over cp too."""
    cp, _ = other_axes(parallel)
    microbatches = global_batch_size // (parallel.dp * parallel.microbatch_size)
    gather = parallel.gather_cadence
    if not framework.is_parallel3d:
        gather = parallel.gather or other_gather(parallel.pp, microbatches)
    split = parallel.dp_shard * cp
    shards = 1 if parallel.strategy in REPLICATED else split
    beyond = {
        "sharding": parallel.strategy,
        "recompute_every": parallel.recompute_every or 1,
        "gather": gather,
        "microbatches": microbatches,
        "parameter_shards": shards,
        "gradient_shards": shards,
        "optimizer_shards": 1 if parallel.strategy == "NO_SHARD" else split,
    }
    return varied(_USUAL, **(vars(parallel) | beyond))


_USUAL = RunLayout()

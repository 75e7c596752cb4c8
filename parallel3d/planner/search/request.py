"""Input and output of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from parallel3d.config.recipe import ParallelConfig, Recompute
from parallel3d.config.sharding_strategies import Cadence, ShardingName
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.framework import PARALLEL3D, FrameworkProfile
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun, from_config
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.training import OptimizerMemory
from parallel3d.planner.model.uncertainty import ErrorModel, error_model_of
from parallel3d.planner.search.goodput import Failures, Goodput
from parallel3d.planner.time.step import Cost, step_cost
from parallel3d.schedules.registry import ScheduleName


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Options fixed by the user. The search chooses those that are None."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    virtual_stages: int | None = None
    schedule: ScheduleName | None = None
    microbatch_size: int | None = None
    recompute: Recompute | None = None
    recompute_every: int | None = None  # For every_n: one block in this many is recomputed.
    sequence_parallel: bool | None = None
    sharding: ShardingName | None = None
    gather: Cadence | None = None
    reduce: Cadence | None = None
    offload: bool | None = None
    max_tp: int | None = None
    max_pp: int | None = None

    def allows(self, **choice: object) -> bool:
        """Returns True if the fixed options allow these values."""
        return all(getattr(self, key) in (None, value) for key, value in choice.items())


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Model, training options and devices to plan for.

    `memory_fraction` limits the predicted fraction of device memory. If `risk` is set, it was
    derived from that risk of running out of memory. `recorded` has the errors on published runs
    (accuracy.json), which determine error ranges.
    """

    shape: ModelShape
    cluster: Cluster
    gpus: int
    seq_len: int
    global_batch_size: int
    precision: str = "bf16"
    framework: FrameworkProfile = PARALLEL3D
    fixed: Fixed = Fixed()
    # Optimizer options that affect memory and time
    training: OptimizerMemory = OptimizerMemory()
    memory_fraction: float = 0.95
    risk: float | None = None
    failures: Failures | None = None
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved_1f1b")  # Schedules to compare.
    imbalance: float = 1.0  # Rows of the fullest rank of experts relative to the mean, in memory.
    recorded: Mapping[str, Any] = field(default_factory=lambda: {"runs_by_hardware": {}})

    @property
    def usable_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.memory_fraction

    @property
    def lacks_experts(self) -> bool:
        """True if the framework cannot train the experts of the shape."""
        experts = self.shape.experts
        if experts is None:
            return False
        framework = self.framework
        is_beyond = self.shape.latent or experts.most_groups
        return "ep" not in framework.axes or bool(is_beyond and framework.is_parallel3d)

    def planned_shape(self, tp: int) -> ModelShape:
        """Returns the shape with the vocabulary padded as the framework does.

        Frameworks other than parallel3d pad it to a multiple of tp and 128 if tp does not divide
        it.
        """
        if self.framework.is_parallel3d or self.shape.vocab % tp == 0:
            return self.shape
        step = lcm(128, tp)
        return replace(self.shape, vocab=-(-self.shape.vocab // step) * step)

    def planned_run(self, parallel: ParallelConfig) -> PlannedRun:
        return PlannedRun(
            shape=self.planned_shape(parallel.tp),
            cluster=self.cluster,
            layout=from_config(parallel, self.global_batch_size, self.framework),
            framework=self.framework,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer=self.training,
            imbalance=self.imbalance,
        )


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Duration of training on a token budget, and its price if the hardware file has one."""

    days: float
    gpu_hours: float
    price: float | None


@dataclass(frozen=True)
class Strategy:
    """A layout for a request. Memory and cost are computed on first use."""

    request: PlanRequest
    parallel: ParallelConfig

    @property
    def run(self) -> PlannedRun:
        return self.request.planned_run(self.parallel)

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of the pipeline rank with the highest peak."""
        return worst_rank(self.run)

    @cached_property
    def cost(self) -> Cost:
        return step_cost(self.run)

    @property
    def goodput(self) -> Goodput | None:
        """Goodput, or None if the request has no failure rate."""
        failures = self.request.failures
        return failures and failures.goodput(self.parallel.world_size)

    @cached_property
    def errors(self) -> ErrorModel:
        """Error model of the predicted memory and speed, from `recorded` of the request."""
        return error_model_of(self.run, self.request.recorded)

    def length(self, tokens: float) -> RunLength:
        """Returns the duration of training on `tokens` tokens.

        It includes the time lost to failures if the plan has a failure rate.
        """
        gpus = self.parallel.world_size
        hourly = self.request.cluster.device.price_per_hour
        hours = tokens / (self.cost.tokens_per_s_per_gpu * gpus) / 3600
        if self.goodput:
            hours /= self.goodput.share
        price = None if hourly is None else hours * gpus * hourly
        return RunLength(days=hours / 24, gpu_hours=hours * gpus, price=price)


class Candidate(NamedTuple):
    """A layout, its step time (infinite if not computed), and the memory of its worst rank.

    If the memory exceeds the limit, it may be that of another rank above the limit.
    """

    parallel: ParallelConfig
    step_time_s: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A tp x pp that does not fit, with its layout that needs the least memory."""

    parallel: ParallelConfig
    reason: str
    short_bytes: float  # Bytes that are missing on the worst rank.


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Result of a search.

    `strategies` are best first. `rejected` has tp x pp that do not fit, nearest to fitting first.
    `checked` counts the layouts whose memory was computed. `priced` has those whose step time was
    also computed, by the closed form. `least_s` is the smallest closed-form step time of the
    layouts that fit, or infinite.
    """

    strategies: tuple[Strategy, ...]
    rejected: tuple[Rejected, ...]
    checked: int
    priced: tuple[Candidate, ...]
    least_s: float

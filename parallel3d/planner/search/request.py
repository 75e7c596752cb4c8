"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any

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
    """What the user has decided: each axis or choice that is not None."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None  # some frameworks have this axis, and the next
    ep: int | None = None
    virtual_stages: int | None = None
    schedule: ScheduleName | None = None
    microbatch_size: int | None = None
    recompute: Recompute | None = None
    recompute_every: int | None = None  # every_n: one of N blocks is recomputed
    sequence_parallel: bool | None = None
    sharding: ShardingName | None = None
    gather: Cadence | None = None
    reduce: Cadence | None = None
    offload: bool | None = None
    max_tp: int | None = None
    max_pp: int | None = None

    def allows(self, **choice: object) -> bool:
        """Returns whether these keys of a layout may have these values."""
        return all(getattr(self, key) in (None, value) for key, value in choice.items())


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be trained, and on which devices.

    `memory_fraction` is how full a device may be predicted to get. If the user asked for a `risk`
    of not fitting, it follows from that risk. `recorded` has the errors on published runs (the
    content of accuracy.json), which decide ties."""

    shape: ModelShape
    cluster: Cluster
    gpus: int
    seq_len: int
    global_batch_size: int
    precision: str = "bf16"
    framework: FrameworkProfile = PARALLEL3D
    fixed: Fixed = Fixed()
    # what parallel3d keeps in addition to parameters and gradients
    training: OptimizerMemory = OptimizerMemory()
    memory_fraction: float = 0.95
    risk: float | None = None
    failures: Failures | None = None
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved_1f1b")  # the schedules that compete
    recorded: Mapping[str, Any] = field(default_factory=lambda: {"runs_by_hardware": {}})

    @property
    def usable_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.memory_fraction

    def planned_shape(self, tp: int) -> ModelShape:
        """The model as the framework takes it: parallel3d takes any vocabulary, other frameworks
        one that tp divides, as it is or padded to a multiple of 128, for tensor cores."""
        if self.framework.is_parallel3d or self.shape.vocab % tp == 0:
            return self.shape
        step = lcm(128, tp)
        return replace(self.shape, vocab=-(-self.shape.vocab // step) * step)

    def planned_run(self, parallel: ParallelConfig) -> PlannedRun:
        """Returns the run that answers the request with a layout."""
        return PlannedRun(
            shape=self.planned_shape(parallel.tp),
            cluster=self.cluster,
            layout=from_config(parallel, self.global_batch_size, self.framework),
            framework=self.framework,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer=self.training,
        )


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a token budget takes, and what it costs if the hardware file has a price."""

    days: float
    gpu_hours: float
    price: float | None


@dataclass(frozen=True)
class Strategy:
    """A layout as an answer to a request on as many devices, priced exactly when its memory or
    cost is asked for."""

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
        """The share of the time that trains; None if the request says nothing about failures."""
        failures = self.request.failures
        return failures and failures.goodput(self.parallel.world_size)

    @cached_property
    def errors(self) -> ErrorModel:
        """How far off the figures may be. The request needs its `recorded` errors for it."""
        return error_model_of(self.run, self.request.recorded)

    def length(self, tokens: float) -> RunLength:
        """Returns how long a run of so many tokens is, with what failures cost."""
        gpus = self.parallel.world_size
        hourly = self.request.cluster.device.price_per_hour
        hours = tokens / (self.cost.tokens_per_s_per_gpu * gpus) / 3600
        if self.goodput:
            hours /= self.goodput.share
        price = None if hourly is None else hours * gpus * hourly
        return RunLength(days=hours / 24, gpu_hours=hours * gpus, price=price)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """The layout with the lowest memory of its tp and pp, if it does not fit, and by how much."""

    parallel: ParallelConfig
    reason: str
    short_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The `strategies` come best first. The tp x pp that do not fit are in `rejected`, the nearest
    to fitting first. `checked` counts the layouts whose memory was computed: all others are slower,
    or a lower bound of their memory is too high. `least_s` is the time of the fastest layout by the
    closed form."""

    strategies: tuple[Strategy, ...]
    rejected: tuple[Rejected, ...]
    checked: int
    least_s: float

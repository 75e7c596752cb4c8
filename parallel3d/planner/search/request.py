"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, lcm
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
from parallel3d.shard_sizes import divisors

_SHORTEST_PART = 4096  # tokens of a sequence that each rank of cp has at least, unless cp is fixed


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
    content of accuracy.json), which decide ties. Without it all ranges are equal."""

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
    recorded: Mapping[str, Any] = field(default_factory=dict)

    def other_axes(self, tp: int, pp: int) -> Iterator[tuple[int, int]]:
        """Returns each cp and ep that the framework may have with this tp and pp: only (1, 1) if it
        has neither axis."""
        left = self.gpus // (tp * pp)
        axes = self.framework.axes
        experts = self.shape.experts
        cps = [1]
        eps = [1]
        if "cp" in axes:
            longest = self.seq_len // _SHORTEST_PART
            most = self.fixed.cp or max(1, longest)
            cps = [cp for cp in divisors(left) if cp == 1 or self.seq_len % (2 * cp) == 0]
            cps = [cp for cp in cps if cp <= most]
        if "ep" in axes and experts is not None:
            eps = divisors(gcd(experts.count, tp * left))
        for cp, ep in product(cps, eps):
            if self.fixed.allows(cp=cp, ep=ep):
                yield cp, ep

    @property
    def memory_rule(self) -> str:
        """The option that says how full a device may get."""
        if self.risk is None:
            return f"--mem-fraction {self.memory_fraction:g}"
        return f"--risk {self.risk:g}"

    @property
    def usable_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.memory_fraction

    def planned_shape(self, tp: int) -> ModelShape:
        """The model as the framework takes it: parallel3d takes any vocabulary, other frameworks
        one that tp divides, as it is or padded to a multiple of 128, for tensor cores."""
        if self.framework.is_parallel3d or self.shape.vocab % tp == 0:
            return self.shape
        return _padded(self.shape, lcm(128, tp))

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


@lru_cache(maxsize=256)
def _padded(shape: ModelShape, step: int) -> ModelShape:
    return replace(shape, vocab=-(-shape.vocab // step) * step)


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

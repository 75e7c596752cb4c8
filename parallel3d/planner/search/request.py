"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, lcm

from parallel3d.config.recipe import ParallelConfig, Recompute
from parallel3d.config.sharding_strategies import Cadence, ShardingName
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.framework import PARALLEL3D, FrameworkProfile
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun, from_config
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.training import OptimizerMemory
from parallel3d.planner.search.goodput import Failures, Goodput
from parallel3d.planner.time.step import Cost, step_cost
from parallel3d.schedules.registry import ScheduleName
from parallel3d.shard_sizes import divisors

_SHORTEST_PART = 4096  # tokens of a sequence that a search leaves to each rank of cp


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
    recompute_every: int | None = None  # every_n: one block of so many is recomputed
    sequence_parallel: bool | None = None
    sharding: ShardingName | None = None
    gather: Cadence | None = None
    reduce: Cadence | None = None
    offload: bool | None = None
    max_tp: int | None = None
    max_pp: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be trained, on what. `memory_fraction`: how full a device may be predicted to get;
    where a `risk` of not fitting was asked for, it is what that leaves."""

    shape: ModelShape
    cluster: Cluster
    gpus: int
    seq_len: int
    global_batch_size: int
    precision: str = "bf16"
    framework: FrameworkProfile = PARALLEL3D
    fixed: Fixed = Fixed()
    # what parallel3d keeps beside parameters and gradients
    training: OptimizerMemory = OptimizerMemory()
    memory_fraction: float = 0.95
    risk: float | None = None
    failures: Failures | None = None
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved_1f1b")  # the schedules that compete

    def axes_beside(self, tp: int, pp: int) -> Iterator[tuple[int, int]]:
        """Returns each cp and ep that the framework may have beside this tp and pp: only (1, 1) if
        it has neither. A part of a sequence is not shorter than `_SHORTEST_PART`, unless cp is
        fixed."""
        left = self.gpus // (tp * pp)
        axes = self.framework.axes
        experts = self.shape.experts
        cps = [1]
        eps = [1]
        if "cp" in axes:
            even = [cp for cp in divisors(left) if self.seq_len % (2 * cp) == 0]
            cps += [cp for cp in even if cp > 1 and self.seq_len >= cp * _SHORTEST_PART]
            if self.fixed.cp is not None:
                cps = [cp for cp in even if cp == self.fixed.cp]
        if "ep" in axes and experts is not None:
            eps = [
                ep for ep in divisors(gcd(experts.count, tp * left)) if self.fixed.ep in (None, ep)
            ]
        return product(cps, eps)

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
    """How long a token budget takes, and what it costs where the hardware file has a price."""

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
        """What the fullest pipeline rank holds."""
        return worst_rank(self.run)

    @cached_property
    def cost(self) -> Cost:
        return step_cost(self.run)

    @property
    def goodput(self) -> Goodput | None:
        """The share of the time that trains; None if the request says nothing about failures."""
        failures = self.request.failures
        return failures and failures.goodput(self.parallel.world_size)

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
    """A layout that does not fit, the leanest of its tp and pp, and by how much."""

    parallel: ParallelConfig
    reason: str
    short_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """`strategies`, best first; tp x pp that do not fit are in `rejected`, nearest to fitting
    first. `checked`: the layouts whose memory was computed; all others are
    slower, or hold too much by a lower bound."""

    strategies: tuple[Strategy, ...]
    rejected: tuple[Rejected, ...]
    checked: int

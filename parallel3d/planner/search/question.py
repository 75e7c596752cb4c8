"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.recipe import ParallelConfig, Recompute
from parallel3d.config.sharding_strategies import Cadence, ShardingName
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.program import PARALLEL3D, TrainingProgram
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.training import OptimizerMemory
from parallel3d.planner.time.step import Cost
from parallel3d.schedules.registry import ScheduleName

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the user has decided: each axis or choice that is not None."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    virtual_stages: int | None = None
    schedule: ScheduleName | None = None
    microbatch_size: int | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    sharding: ShardingName | None = None
    gather: Cadence | None = None
    reduce: Cadence | None = None
    max_tp: int | None = None
    max_pp: int | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained, on what. `memory_fraction`: how full a device may get."""

    shape: ModelShape
    cluster: Cluster
    gpus: int
    seq_len: int
    global_batch_size: int
    precision: str = "bf16"
    program: TrainingProgram = PARALLEL3D
    fixed: Fixed = Fixed()
    training: OptimizerMemory = OptimizerMemory()  # what parallel3d keeps beside parameters and gradients
    memory_fraction: float = 0.95
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved_1f1b")  # the schedules that compete

    @property
    def usable_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.memory_fraction


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A layout that fits, with what it costs."""

    parallel: ParallelConfig
    memory: RankMemory  # what the fullest pipeline rank holds
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A layout that does not fit, the leanest of its tp and pp, and by how much."""

    parallel: ParallelConfig
    reason: str
    short_bytes: float


@dataclass(frozen=True, kw_only=True)
class NotShown:
    """A tp x pp of which the answer has no strategy although memory is not the reason, and what is."""

    tp: int
    pp: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`strategies`, best first; every other tp x pp is in `rejected`, nearest to fitting first, or in `left_out`;
    `considered`: how many layouts there are; `checked`, `fitting`: those whose memory was computed, and that fit. The
    others are slower than what is told, or hold too much by a lower bound."""

    strategies: tuple[Strategy, ...]
    rejected: tuple[Rejected, ...]
    left_out: tuple[NotShown, ...]
    considered: int
    checked: int
    fitting: int


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a token budget takes, and what it costs where the hardware file has a price."""

    days: float
    gpu_hours: float
    price: float | None


def run_length(question: Question, strategy: Strategy, tokens: float) -> RunLength:
    seconds = tokens / (strategy.cost.tokens_per_s_per_gpu * question.gpus)
    gpu_hours = seconds / 3600 * question.gpus
    hourly = question.cluster.device.price_per_hour
    price = None if hourly is None else gpu_hours * hourly
    return RunLength(days=seconds / _SECONDS_PER_DAY, gpu_hours=gpu_hours, price=price)

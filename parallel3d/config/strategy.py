"""The strategies of the data dimension by the names that people know; no torch.

    strategy             ZeRO   split over dp_shard                       repeated over
    NO_SHARD             0      nothing                                   dp_replicate and dp_shard
    SHARD_OPTIMIZER      1      optimizer states, master weights          dp_replicate (parameters: dp_shard too)
    SHARD_GRAD_OP        2      and gradients, parameters between steps   -
    FULL_SHARD           3      and parameters between uses               -
    _HYBRID_SHARD_ZERO2  2      as SHARD_GRAD_OP                          dp_replicate
    HYBRID_SHARD         3      as FULL_SHARD                             dp_replicate

ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054. The names of the others are those of torch's FSDP (Zhao et al. 2023,
arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from parallel3d.schedules.registry import SCHEDULES

if TYPE_CHECKING:
    from parallel3d.config.recipe import ParallelConfig

ShardingName = Literal[
    "NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
]
Cadence = Literal["step", "microbatch"]

WHOLE: tuple[ShardingName, ...] = ("NO_SHARD", "SHARD_OPTIMIZER")  # every data rank computes with its own parameters
ZERO_3: tuple[ShardingName, ...] = ("FULL_SHARD", "HYBRID_SHARD")  # parameters freed between forward and backward
HYBRID_OF: dict[ShardingName, ShardingName] = {
    "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2",
    "FULL_SHARD": "HYBRID_SHARD",
}
_OF_ZERO_STAGE: dict[int, ShardingName] = {0: "NO_SHARD", 1: "SHARD_OPTIMIZER", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
USUAL_BUCKET_MIB = 25.0  # as DistributedDataParallel's


def strategy_of(parallel: ParallelConfig) -> ShardingName:
    """What `sharding` and its alias `zero_stage` say; where they say nothing, FULL_SHARD, and HYBRID_SHARD where there
    are replicas."""
    if parallel.sharding is not None:
        return parallel.sharding
    return _of_zero_stage(3 if parallel.zero_stage is None else parallel.zero_stage, parallel.dp_replicate)


def sharding_faults(parallel: ParallelConfig) -> Iterator[str]:
    """A line for each rule of the data dimension that a layout breaks."""
    stage, replicas = parallel.zero_stage, parallel.dp_replicate
    if stage is not None and stage not in _OF_ZERO_STAGE:
        yield f"parallel.zero_stage = {stage}: must be 0, 1, 2, 3 or null; try 3"
        return
    if stage is not None and parallel.sharding is not None:
        meant = _of_zero_stage(stage, replicas)
        if parallel.sharding != meant:
            yield (
                f"parallel.zero_stage = {stage}: is another name for parallel.sharding = {meant}, and that is "
                f"{parallel.sharding}; try parallel.zero_stage=null"
            )
    strategy = strategy_of(parallel)
    if strategy in HYBRID_OF and replicas > 1:
        yield (
            f"parallel.sharding = {strategy}: leaves nothing to replicate, and parallel.dp_replicate = {replicas}; "
            f"try {HYBRID_OF[strategy]}, or parallel.dp_replicate=1"
        )
    if strategy in WHOLE:
        yield from _whole_faults(parallel, strategy)
    elif parallel.bucket_mib != USUAL_BUCKET_MIB:
        yield (
            f"parallel.bucket_mib = {parallel.bucket_mib:g}: parallel.sharding = {strategy} sends block by block; drop "
            f"it, or try parallel.sharding=NO_SHARD"
        )
    if parallel.reduce == "microbatch" and SCHEDULES[parallel.schedule].splits_backward:
        yield (
            f"parallel.reduce = microbatch: needs backwards in one piece, and parallel.schedule = {parallel.schedule} "
            f"splits them; try parallel.reduce=step, or parallel.schedule=1f1b"
        )


def _whole_faults(parallel: ParallelConfig, strategy: ShardingName) -> Iterator[str]:
    """What means nothing where parameters are whole on each rank."""
    if parallel.gather == "microbatch":
        yield (
            f"parallel.gather = microbatch: parallel.sharding = {strategy} has whole parameters and gathers none for a "
            f"microbatch; try parallel.gather=step, or parallel.zero_stage=3"
        )
    if parallel.reduce == "microbatch":
        yield (
            f"parallel.reduce = microbatch: parallel.sharding = {strategy} keeps whole gradients, and would save "
            f"nothing; try parallel.reduce=step, or parallel.zero_stage=2"
        )
    if parallel.prefetch is not None:
        yield (
            f"parallel.prefetch = {parallel.prefetch}: parallel.sharding = {strategy} has whole parameters and gathers "
            f"none ahead; try parallel.prefetch=null, or parallel.zero_stage=3"
        )


def _of_zero_stage(stage: int, replicas: int) -> ShardingName:
    strategy = _OF_ZERO_STAGE[stage]
    return HYBRID_OF.get(strategy, strategy) if replicas > 1 else strategy

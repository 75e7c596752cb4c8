"""The strategies of the data dimension by their usual names; no torch.

    strategy             ZeRO  split over dp_shard                      repeated over
    NO_SHARD             0     nothing                                  dp_replicate and dp_shard
    SHARD_OPTIMIZER      1     optimizer states, master weights         dp_replicate (1)
    SHARD_GRAD_OP        2     and gradients, parameters between steps  -
    FULL_SHARD           3     and parameters between uses              -
    _HYBRID_SHARD_ZERO2  2     as SHARD_GRAD_OP                         dp_replicate
    HYBRID_SHARD         3     as FULL_SHARD                            dp_replicate

(1) Parameters are repeated over dp_shard too.
ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054. The names of the others are those of torch's FSDP
(Zhao et al. 2023, arXiv 2304.11277).
"""

from __future__ import annotations

from typing import Literal

ShardingName = Literal[
    "NO_SHARD",
    "SHARD_OPTIMIZER",
    "SHARD_GRAD_OP",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
]
Cadence = Literal["step", "microbatch"]

# whole parameters on each rank
REPLICATED: tuple[ShardingName, ...] = ("NO_SHARD", "SHARD_OPTIMIZER")
FREED_BETWEEN_USES: tuple[ShardingName, ...] = ("FULL_SHARD", "HYBRID_SHARD")
# The strategies that allow no replicas -> those that do the same with dp_replicate > 1.
HYBRID_OF: dict[ShardingName, ShardingName] = {
    "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2",
    "FULL_SHARD": "HYBRID_SHARD",
}
# by ZeRO's stage
_OF_ZERO_STAGE: tuple[ShardingName, ...] = (*REPLICATED, *HYBRID_OF)


def usual_bucket_mib(*, on_gpu: bool) -> float:
    """Returns the default of `parallel.bucket_mib`: that of DistributedDataParallel's buckets, and
    more on GPUs, whose links need larger messages to be busy."""
    return 100.0 if on_gpu else 25.0


def default_gather(strategy: ShardingName, pp: int) -> Cadence:
    """Returns how often a step gathers parameters that are split at rest, unless the user says it.
    As in PyTorch, ZeRO-3 frees them after each forward and backward pass. In a pipeline it keeps
    them for the step, because its forward and backward passes alternate."""
    return "microbatch" if strategy in FREED_BETWEEN_USES and pp == 1 else "step"


def frees_after_forward(strategy: ShardingName, gather: Cadence) -> bool:
    """Returns whether a block's gathered parameters are freed after its forward pass, and gathered
    again for its backward pass."""
    return strategy in FREED_BETWEEN_USES and gather == "microbatch"


def strategy_of(
    sharding: ShardingName | None, zero_stage: int | None, dp_replicate: int
) -> ShardingName:
    """Returns the strategy that `sharding`, or its alias `zero_stage`, stands for. If both are None
    it is FULL_SHARD, or HYBRID_SHARD with replicas."""
    if sharding is not None:
        return sharding
    strategy = _OF_ZERO_STAGE[3 if zero_stage is None else zero_stage]
    return HYBRID_OF.get(strategy, strategy) if dp_replicate > 1 else strategy

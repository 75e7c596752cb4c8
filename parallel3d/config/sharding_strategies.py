"""Sharding strategies of the data-parallel axes. Does not import torch.

    strategy             ZeRO  sharded over dp_shard                    replicated over
    NO_SHARD             0     nothing                                  dp_replicate and dp_shard
    SHARD_OPTIMIZER      1     optimizer states, master weights         dp_replicate (1)
    SHARD_GRAD_OP        2     + gradients, parameters between steps    -
    FULL_SHARD           3     + parameters between uses                -
    _HYBRID_SHARD_ZERO2  2     as SHARD_GRAD_OP                         dp_replicate
    HYBRID_SHARD         3     as FULL_SHARD                            dp_replicate

(1) Parameters are replicated over dp_shard too.

ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054. The other names are those of FSDP in torch (Zhao et
al. 2023, arXiv 2304.11277).
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

# Strategies with full parameters on each rank.
REPLICATED: tuple[ShardingName, ...] = ("NO_SHARD", "SHARD_OPTIMIZER")
FREED_BETWEEN_USES: tuple[ShardingName, ...] = ("FULL_SHARD", "HYBRID_SHARD")
# Equivalents, for dp_replicate > 1, of the strategies that do not allow replicas.
HYBRID_OF: dict[ShardingName, ShardingName] = {
    "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2",
    "FULL_SHARD": "HYBRID_SHARD",
}
# Strategy of each ZeRO stage if dp_replicate is 1.
_OF_ZERO_STAGE: tuple[ShardingName, ...] = (*REPLICATED, *HYBRID_OF)


def usual_bucket_mib(*, on_gpu: bool) -> float:
    """Returns the default of `parallel.bucket_mib`.

    GPU links need large messages. On CPUs, malloc reuses memory only up to 32 MiB, and larger
    copies of a bucket would get new pages in every step.
    """
    return 100.0 if on_gpu else 10.0


def default_gather(strategy: ShardingName, pp: int) -> Cadence:
    """Returns the default of `parallel.gather`.

    As in FSDP of torch, ZeRO-3 frees parameters after each forward or backward pass. With a
    pipeline it keeps them for the step, because forward and backward passes alternate."""
    return "microbatch" if strategy in FREED_BETWEEN_USES and pp == 1 else "step"


def frees_after_forward(strategy: ShardingName, gather: Cadence) -> bool:
    """Returns True if a block is resharded after its forward pass and all-gathered again for its
    backward pass.
    """
    return strategy in FREED_BETWEEN_USES and gather == "microbatch"


def strategy_of(
    sharding: ShardingName | None, zero_stage: int | None, dp_replicate: int
) -> ShardingName:
    """Returns the strategy that `sharding`, or its alias `zero_stage`, selects. Default:
    FULL_SHARD, or HYBRID_SHARD with replicas."""
    if sharding is not None:
        return sharding
    strategy = _OF_ZERO_STAGE[3 if zero_stage is None else zero_stage]
    return HYBRID_OF.get(strategy, strategy) if dp_replicate > 1 else strategy

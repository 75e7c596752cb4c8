"""The rules of the tensor and the data dimension of a layout, and of recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.config.rules.model import divides_key_value_heads
from parallel3d.config.rules.suggestions import any_of, divisors_near
from parallel3d.config.strategy import HYBRID_OF, OF_ZERO_STAGE, REPLICATED, USUAL_BUCKET_MIB, ShardingName, strategy_of
from parallel3d.schedules.registry import SCHEDULES


def parallel_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each rule that tp or recompute breaks."""
    model, parallel, train = recipe.model, recipe.parallel, recipe.train
    split_by_tp = {"model.heads": model.heads, "model.ffn_hidden": model.ffn_hidden}
    if model.kv_heads is not None and not divides_key_value_heads(model.kv_heads, parallel.tp):
        split_by_tp["model.kv_heads"] = model.kv_heads
    if parallel.sequence_parallel:
        split_by_tp["train.seq_len"] = train.seq_len
    uneven = {key: size for key, size in split_by_tp.items() if size % parallel.tp}
    if uneven:
        which = " and ".join(f"{key} = {size}" for key, size in uneven.items())
        tries = any_of(divisors_near(math.gcd(*split_by_tp.values()), parallel.tp))
        yield f"parallel.tp = {parallel.tp}: must divide {which}; try {tries}"
    if parallel.recompute == "every_n" and parallel.recompute_every is None:
        yield "parallel.recompute_every = null: parallel.recompute = every_n needs it; try 2, every other block"
    elif parallel.recompute_every is not None and parallel.recompute != "every_n":
        yield (
            f"parallel.recompute_every = {parallel.recompute_every}: is for parallel.recompute = every_n, and it is "
            f"{parallel.recompute}; try parallel.recompute=every_n, or drop it"
        )
    elif parallel.recompute_every is not None and parallel.recompute_every > model.layers:
        yield (
            f"parallel.recompute_every = {parallel.recompute_every}: must be at most model.layers = {model.layers}; "
            f"try 2"
        )


def sharding_errors(parallel: ParallelConfig) -> Iterator[str]:
    """One line for each rule of the data dimension that a layout breaks."""
    stage, replicas = parallel.zero_stage, parallel.dp_replicate
    if stage is not None and stage not in OF_ZERO_STAGE:
        yield f"parallel.zero_stage = {stage}: must be 0, 1, 2, 3 or null; try 3"
        return
    if stage is not None and parallel.sharding is not None:
        meant = strategy_of(None, stage, replicas)
        if parallel.sharding != meant:
            yield (
                f"parallel.zero_stage = {stage}: is another name for parallel.sharding = {meant}, and that is "
                f"{parallel.sharding}; try parallel.zero_stage=null"
            )
    strategy = parallel.strategy
    if (error := replication_error(strategy, replicas)) is not None:
        yield error
    if strategy in REPLICATED:
        yield from _unsharded_errors(parallel, strategy)
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


def replication_error(strategy: ShardingName, dp_replicate: int) -> str | None:
    """The error of a strategy that splits over all data ranks where there are replicas; None where the two fit."""
    if strategy not in HYBRID_OF or dp_replicate == 1:
        return None
    return (
        f"parallel.sharding = {strategy}: leaves nothing to replicate, and parallel.dp_replicate = {dp_replicate}; "
        f"try {HYBRID_OF[strategy]}, or parallel.dp_replicate=1"
    )


def _unsharded_errors(parallel: ParallelConfig, strategy: ShardingName) -> Iterator[str]:
    """One line for each setting that does nothing where every data rank has whole parameters."""
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

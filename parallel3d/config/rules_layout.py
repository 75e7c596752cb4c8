"""The rules for a model and its layout: divisibility by tp, data-parallel ranks, stages and
microbatches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import attrgetter

from parallel3d.config.example_values import any_of, multiple_from, multiples_near, nearest
from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.config.sharding_strategies import (
    HYBRID_OF,
    REPLICATED,
    ShardingName,
    strategy_of,
    usual_bucket_mib,
)
from parallel3d.config.yaml_text import shown
from parallel3d.schedules.blocks_per_stage import blocks_per_stage, faults_of_boundaries
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.shard_sizes import divisors, shard_rows


def rule(check: Callable[[Recipe], Iterator[str]]) -> Callable[[Recipe], Iterator[str]]:
    """Decorates a function that yields error lines. A key in angle brackets is followed by its
    value, so that `<parallel.tp>` becomes `parallel.tp = 3`."""

    def lines(recipe: Recipe) -> Iterator[str]:
        for line in check(recipe):
            yield re.sub(
                r"<([\w.]+)>", lambda key: f"{key[1]} = {shown(attrgetter(key[1])(recipe))}", line
            )

    return lines


def at_most(recipe: Recipe, key: str, limit: str, tries: object) -> Iterator[str]:
    """Yields an error line, for use in a `rule`, if the value of `key` is larger than the value of
    the key `limit`."""
    value, most = attrgetter(key, limit)(recipe)
    if None not in (value, most) and value > most:
        yield f"<{key}>: must be at most <{limit}>; try {tries}"


def divides_key_value_heads(kv_heads: int, tp: int) -> bool:
    """Returns True if tp splits the key-value heads evenly, or if each of them can be replicated on
    tp / kv_heads ranks."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


@rule
def model_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each key of the model that conflicts with other keys, tp or the
    sequence length."""
    model = recipe.model
    tp = recipe.parallel.tp
    seq_len = recipe.train.seq_len
    if model.head_dim is None and model.hidden % model.heads:
        # A divisor of hidden / 2 gives an even head_dim.
        tries = any_of(nearest(divisors(model.hidden // 2), model.heads) or [1])
        yield f"<model.heads>: must divide <model.hidden>; try {tries}"
    elif model.head_size % 2 and model.architecture == "llama":
        yield (
            f"model.head_dim = {model.head_size}: must be even for rotary positions; try "
            f"model.head_dim={model.head_size + 1}"
        )
    if model.heads % model.key_value_heads:
        tries = any_of(nearest(divisors(model.heads), model.key_value_heads))
        yield f"<model.kv_heads>: must divide <model.heads>; try {tries}"
    if not shard_rows(model.vocab, tp - 1, tp):
        yield (
            "<model.vocab>: leaves a rank without embedding rows, because <parallel.tp>; try "
            f"{multiple_from(model.vocab, tp)}"
        )
    if model.architecture not in ("llama", "gpt") and not model.is_custom:
        yield (
            "<model.architecture>: must be llama, gpt, transformers or module:Class; try "
            "my_model:MyModel"
        )
        return
    for key in ("options", "tp_rules", "stages"):
        if getattr(model, key) and not model.is_custom:
            yield (
                f"<model.{key}>: only for a class of your own, my_model:MyModel, or for "
                f"architecture = transformers; try to remove {key}"
            )
    if model.architecture == "gpt" and (model.max_positions or 0) < seq_len:
        yield f"<model.max_positions>: must be at least <train.seq_len>; try {seq_len}"


# Keys of `model.rope_scaling` that only one type uses. The lower bound of the blend is first, the
# upper second.
SCALING_KEYS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast", "attention_factor"),
}


@rule
def rope_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line if the bounds in `model.rope_scaling` are in the wrong order."""
    scaling = recipe.model.rope_scaling
    if scaling is None:
        return
    low, high, *_ = SCALING_KEYS[scaling.type]
    least = getattr(scaling, low)
    most = getattr(scaling, high)
    if least >= most:
        name = f"model.rope_scaling.{low}"
        yield f"<{name}>: must be below <model.rope_scaling.{high}>; try {name}={most / 4:g}"


@rule
def parallel_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each violated rule of tp, cp or recompute."""
    model = recipe.model
    parallel = recipe.parallel
    seq_len = recipe.train.seq_len
    own_tokens = recipe.own_seq_len
    chunks = parallel.sequence_chunks
    if seq_len % chunks:
        yield (
            f"<train.seq_len>: must be a multiple of {chunks}, because <parallel.cp> splits a "
            f"sequence into {chunks} chunks; try {any_of(multiples_near(seq_len, chunks))}"
        )
    split_by_tp = {"model.heads": model.heads, "model.ffn_hidden": model.ffn_hidden}
    if model.kv_heads is not None and not divides_key_value_heads(model.kv_heads, parallel.tp):
        split_by_tp["model.kv_heads"] = model.kv_heads
    shown_keys = {key: f"<{key}>" for key in split_by_tp}
    if parallel.sequence_parallel:
        split_by_tp["train.seq_len"] = own_tokens
        shown_keys["train.seq_len"] = (
            f"train.seq_len / parallel.cp = {own_tokens}" if parallel.cp > 1 else "<train.seq_len>"
        )
    uneven = [shown_keys[key] for key, size in split_by_tp.items() if size % parallel.tp]
    if uneven:
        fitting = divisors(math.gcd(*split_by_tp.values()))
        if model.kv_heads is not None:
            fitting = [tp for tp in fitting if divides_key_value_heads(model.kv_heads, tp)]
        yield (
            f"<parallel.tp>: must divide {' and '.join(uneven)}; try "
            f"{any_of(nearest(fitting, parallel.tp))}"
        )
    if (parallel.recompute == "every_n") != (parallel.recompute_every is not None):
        yield (
            "<parallel.recompute_every>: must be set if and only if parallel.recompute = "
            "every_n; try parallel.recompute=every_n with parallel.recompute_every=2"
        )
    yield from at_most(recipe, "parallel.recompute_every", "model.layers", 2)


@rule
def expert_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each violated rule of the experts and their ranks."""
    experts = recipe.model.experts
    parallel = recipe.parallel
    ep = parallel.expert_ranks
    if experts is None:
        if parallel.ep is not None:
            yield "<parallel.ep>: only used with model.experts; try parallel.ep=null"
        return
    if recipe.model.architecture != "llama":
        yield "model.experts: not supported with <model.architecture>; try model.architecture=llama"
    if experts.per_token > experts.count:
        yield (
            "<model.experts.per_token>: must be at most <model.experts.count>; try "
            f"{min(2, experts.count)}"
        )
    if experts.dense_layers > recipe.model.layers:
        yield "<model.experts.dense_layers>: must be at most <model.layers>; try 1"
    if experts.shared_gate and not experts.shared_hidden:
        yield (
            "<model.experts.shared_gate>: only used with model.experts.shared_hidden; try "
            f"model.experts.shared_hidden={experts.hidden}, or remove shared_gate"
        )
    ranks = parallel.shard_ranks * parallel.tp
    if ranks % ep or experts.count % ep or ep % parallel.tp:
        fitting = [
            size for size in divisors(math.gcd(ranks, experts.count)) if size % parallel.tp == 0
        ]
        tries = (
            f"try parallel.ep={any_of(nearest(fitting, ep))}" if fitting else "try parallel.tp=1"
        )
        yield (
            f"parallel.ep = {ep}: must divide dp_shard x cp x tp = {ranks} and "
            f"<model.experts.count>, and be a multiple of <parallel.tp>; {tries}"
        )
    tokens = parallel.microbatch_size * recipe.own_seq_len
    if tokens % parallel.tp:
        yield (
            f"<parallel.microbatch_size>: a microbatch of {tokens} tokens on a rank must be a "
            f"multiple of <parallel.tp>; try {parallel.tp}"
        )
    if experts.bias_rate and recipe.local_sgd.sync_every is not None:
        yield (
            "<model.experts.bias_rate>: not supported with <local_sgd.sync_every>, because "
            "replicas would choose different experts; try model.experts.bias_rate=0"
        )


def sharding_errors(parallel: ParallelConfig) -> Iterator[str]:
    """Yields an error line for each violated rule of the data-parallel axes."""
    stage = parallel.zero_stage
    replicas = parallel.dp_replicate
    strategy = parallel.strategy
    if stage is not None and (meant := strategy_of(None, stage, replicas)) != strategy:
        yield (
            f"parallel.zero_stage = {stage}: means parallel.sharding = {meant}, but that is "
            f"{strategy}; try parallel.zero_stage=null"
        )
    if (error := replication_error(strategy, replicas)) is not None:
        yield error
    is_replicated = strategy in REPLICATED
    for key, usual, other in (("gather", None, 3), ("reduce", "step", 2), ("prefetch", None, 3)):
        # The config.yaml of an earlier run may contain gather = step.
        if is_replicated and getattr(parallel, key) not in (usual, "step"):
            yield (
                f"parallel.{key} = {getattr(parallel, key)}: not used with parallel.sharding = "
                f"{strategy}, which keeps full parameters and gradients on each rank; try "
                f"parallel.{key}={shown(usual)}, or parallel.zero_stage={other}"
            )
    if is_replicated and parallel.offload:
        yield (
            f"parallel.offload = true: not supported with parallel.sharding = {strategy}, which "
            "keeps full parameters on each rank; try parallel.sharding=FULL_SHARD"
        )
    # The config.yaml of an earlier run may contain the default size.
    if not is_replicated and parallel.bucket_mib not in (None, usual_bucket_mib(on_gpu=False)):
        yield (
            f"parallel.bucket_mib = {parallel.bucket_mib}: not used with parallel.sharding = "
            f"{strategy}, which sends block by block; remove it, or try parallel.sharding=NO_SHARD"
        )
    if parallel.reduce == "microbatch" and SCHEDULES[parallel.schedule].splits_backward:
        yield (
            f"parallel.reduce = microbatch: not with parallel.schedule = {parallel.schedule}, "
            "which splits the backward pass; try parallel.reduce=step, or parallel.schedule=1f1b"
        )
    if parallel.reduce == "microbatch" and parallel.reduce_dtype == "bf16" and replicas > 1:
        yield (
            "parallel.reduce = microbatch: would accumulate gradients in bf16, because "
            f"parallel.reduce_dtype = bf16 and parallel.dp_replicate = {replicas}; try "
            "parallel.reduce=step, or parallel.reduce_dtype=fp32"
        )


def replication_error(strategy: ShardingName, dp_replicate: int) -> str | None:
    """Returns the error of a strategy that does not allow replicas, or None if strategy and
    replicas are compatible."""
    if strategy not in HYBRID_OF or dp_replicate == 1:
        return None
    return (
        f"parallel.sharding = {strategy}: does not support replicas, but parallel.dp_replicate = "
        f"{dp_replicate}; try {HYBRID_OF[strategy]}, or parallel.dp_replicate=1"
    )


@rule
def schedule_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each violated rule of the pipeline stages and the schedule."""
    parallel = recipe.parallel
    layers = recipe.model.layers
    virtual = parallel.virtual_stages
    stages = SCHEDULES[parallel.schedule].stages
    boundaries = parallel.stage_boundaries
    if parallel.stages > layers:
        yield (
            f"<parallel.pp>: {parallel.stages} stages (<parallel.virtual_stages>) need at least "
            f"as many layers, but <model.layers>; try parallel.pp={max(1, layers // virtual)} or "
            f"model.layers={parallel.stages}"
        )
    elif boundaries is not None and (
        fault := faults_of_boundaries(boundaries, layers, parallel.stages)
    ):
        costs = recipe.model.part_costs(recipe.train.seq_len)
        sizes = blocks_per_stage(layers, parallel.stages, costs)
        tries = [*accumulate(sizes[:-1])]
        yield f"<parallel.stage_boundaries>: {fault}; try {tries}"
    if not stages.allow(virtual):
        other = ", or parallel.schedule=interleaved_1f1b" if virtual > 1 else ""
        yield (
            f"<parallel.virtual_stages>: must be {stages.usual} with <parallel.schedule>; try "
            f"parallel.virtual_stages={stages.usual}{other}"
        )
    elif stages.usual > 1 and 1 in (virtual, parallel.pp):
        yield (
            "<parallel.schedule>: interleaves stages, so pp and virtual_stages must be at least "
            "2, but <parallel.pp> and <parallel.virtual_stages>; try parallel.pp=2 with "
            "parallel.virtual_stages=2, or parallel.schedule=1f1b with parallel.virtual_stages=1"
        )


@rule
def batch_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each number of sequences that data-parallel ranks and microbatches
    do not divide, and for each violated rule of the batch warmup."""
    parallel = recipe.parallel
    train = recipe.train
    start = train.batch_warmup_start
    full = train.global_batch_size
    # sequences in one microbatch of all data-parallel ranks
    slice_ = parallel.dp * parallel.microbatch_size
    sizes = {"global_batch_size": full}
    if train.eval_every is not None:
        sizes["eval_sequences"] = train.eval_sequences
    if start is not None:
        increment = train.batch_warmup_increment or start
        sizes |= {"batch_warmup_start": start, "batch_warmup_increment": increment}
    for key, size in sizes.items():
        if size % slice_:
            yield (
                f"train.{key} = {size}: must be a multiple of {parallel.dp} data-parallel ranks x "
                f"parallel.microbatch_size {parallel.microbatch_size} = {slice_}; try "
                f"{any_of(multiples_near(size, slice_))}"
            )
    if start is None:
        return
    if train.batch_warmup_steps is None:
        yield (
            "<train.batch_warmup_start>: requires train.batch_warmup_steps; try "
            f"{max(1, train.steps // 10)}"
        )
    yield from at_most(recipe, "train.batch_warmup_start", "train.global_batch_size", slice_)
    if (full - start) % increment and start < full:
        yield (
            f"train.batch_warmup_increment = {increment}: must divide train.global_batch_size - "
            f"train.batch_warmup_start = {full - start}; try {slice_}"
        )

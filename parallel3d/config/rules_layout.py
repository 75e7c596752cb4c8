"""The rules that a model and its layout must keep: what tp, the data ranks, the stages and the microbatches divide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from parallel3d.config.ranges import any_of, divisors_near, multiple_from, multiples_near, nearest
from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.config.sharding_strategies import (
    HYBRID_OF,
    OF_ZERO_STAGE,
    REPLICATED,
    USUAL_BUCKET_MIB,
    ShardingName,
    strategy_of,
)
from parallel3d.row_split import divisors, shard_rows
from parallel3d.schedules.balance import balanced_cut, cut_points, faults_of_boundaries
from parallel3d.schedules.registry import SCHEDULES

BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end of a text


def divides_key_value_heads(kv_heads: int, tp: int) -> bool:
    """True if each tp rank computes equally many key-value heads, or tp / kv_heads ranks compute each of them."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def leaves_no_rank_empty(vocab: int, tp: int) -> bool:
    """True if every tp rank has a row of the vocabulary's table, which is cut in equal parts but for the last ones."""
    return len(shard_rows(vocab, tp - 1, tp)) > 0


def model_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each number of the model that does not fit the others or tp."""
    model, tp = recipe.model, recipe.parallel.tp
    if model.hidden % model.heads:
        # A divisor of half the width leaves an even number to each head.
        tries = any_of(divisors_near(model.hidden // 2, model.heads) or [1])
        yield f"model.heads = {model.heads}: must divide model.hidden = {model.hidden}; try {tries}"
    elif model.head_dim % 2 and model.architecture == "llama":
        yield (
            f"model.heads = {model.heads}: makes heads of {model.head_dim} numbers, which rotary positions need in "
            f"pairs; try model.hidden={model.hidden + model.heads}"
        )
    if model.heads % model.key_value_heads:
        tries = any_of(divisors_near(model.heads, model.key_value_heads))
        yield f"model.kv_heads = {model.key_value_heads}: must divide model.heads = {model.heads}; try {tries}"
    if not leaves_no_rank_empty(model.vocab, tp):
        yield (
            f"model.vocab = {model.vocab}: leaves a rank of parallel.tp = {tp} without a row of the embedding; "
            f"try {multiple_from(model.vocab, tp)}"
        )
    yield from architecture_errors(recipe)


def tokenizer_errors(recipe: Recipe) -> Iterator[str]:
    """One line if the vocabulary is too small for the tokenizer's ids."""
    vocab = recipe.model.vocab
    if recipe.data.tokenizer == "bytes" and vocab < BYTE_TOKENIZER_IDS:
        yield (
            f"model.vocab = {vocab}: must be at least {BYTE_TOKENIZER_IDS}, the ids of data.tokenizer = bytes; "
            f"try {multiple_from(BYTE_TOKENIZER_IDS, recipe.parallel.tp)}"
        )


# The keys that only one architecture has -> why the other has no use for them.
_KEYS_OF = {
    "llama": {
        "rope_theta": "gpt has learned positions",
        "qkv_bias": "gpt has biases on every linear layer",
        "qk_norm": "gpt has none",
        "window": "gpt's queries see all keys before them",
    },
    "gpt": {"max_positions": "llama turns queries and keys instead, and needs no table of positions"},
}


def architecture_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each key that the architecture does not read, and one for gpt's table of positions if it is missing
    or too short."""
    model, seq_len = recipe.model, recipe.train.seq_len
    defaults = {key.name: key.default for key in fields(model)}
    for architecture, keys in _KEYS_OF.items():
        for key, why in keys.items() if architecture != model.architecture else ():
            if getattr(model, key) != defaults[key]:
                yield (
                    f"model.{key} = {getattr(model, key)}: is not for model.architecture = {model.architecture} "
                    f"({why}); drop it, or try model.architecture={architecture}"
                )
    if model.architecture == "gpt" and (model.max_positions is None or model.max_positions < seq_len):
        shown = "null" if model.max_positions is None else model.max_positions
        yield f"model.max_positions = {shown}: must be at least train.seq_len = {seq_len}; try {seq_len}"


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
        fitting = divisors(math.gcd(*split_by_tp.values()))
        if model.kv_heads is not None:
            fitting = [tp for tp in fitting if divides_key_value_heads(model.kv_heads, tp)]
        tries = any_of(nearest(fitting, parallel.tp))
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


def schedule_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each rule of the pipeline that the recipe breaks."""
    parallel, layers = recipe.parallel, recipe.model.layers
    if parallel.stages > layers:
        virtual = "" if parallel.virtual_stages == 1 else f" x parallel.virtual_stages {parallel.virtual_stages}"
        pp = max(1, layers // parallel.virtual_stages)
        yield (
            f"parallel.pp = {parallel.pp}{virtual}: {layers} layers cannot fill {parallel.stages} stages; "
            f"try parallel.pp={pp} or model.layers={parallel.stages}"
        )
    elif parallel.stage_boundaries is not None:
        fault = faults_of_boundaries(parallel.stage_boundaries, layers, parallel.stages)
        if fault is not None:
            tries = list(
                cut_points(balanced_cut(layers, parallel.stages, recipe.model.part_costs(recipe.train.seq_len)))
            )
            yield f"parallel.stage_boundaries = {list(parallel.stage_boundaries)}: {fault}; try {tries}"
    yield from stages_per_rank_errors(parallel)
    if recipe.train.compile:
        yield from compile_errors(parallel)


def stages_per_rank_errors(parallel: ParallelConfig) -> Iterator[str]:
    """One line if the schedule cannot run with this number of stages on each rank."""
    name, virtual = parallel.schedule, parallel.virtual_stages
    wanted = SCHEDULES[name]
    usual = wanted.stages.usual
    if wanted.stages.most == 1 and virtual > 1:
        many = [other.name for other in SCHEDULES.values() if other.stages.usual > 1 and other.stages.allow(virtual)]
        yield (
            f"parallel.virtual_stages = {virtual}: needs parallel.schedule = {any_of(many)}, and it is {name}; "
            f"try parallel.schedule={many[0]} or parallel.virtual_stages=1"
        )
    elif not wanted.stages.allow(virtual):
        yield (
            f"parallel.virtual_stages = {virtual}: must be {usual} with parallel.schedule = {name}, whose "
            f"ranks hold a stage on the way down and one on the way up; try parallel.virtual_stages={usual}"
        )
    elif usual > 1 and virtual == 1:
        yield (
            f"parallel.schedule = {name}: has nothing to interleave with parallel.virtual_stages = 1; "
            f"try parallel.schedule={wanted.single_stage} or parallel.virtual_stages=2"
        )
    elif usual > 1 and parallel.pp == 1:
        yield (
            f"parallel.schedule = {name}: needs a pipeline, and parallel.pp = 1; "
            "try parallel.pp=2, or parallel.schedule=1f1b with parallel.virtual_stages=1"
        )


def compile_errors(parallel: ParallelConfig) -> Iterator[str]:
    """One line for each choice that would have to look into a block, of which `torch.compile` makes one piece."""
    schedule, recompute = SCHEDULES[parallel.schedule], parallel.recompute
    if schedule.splits_backward:
        yield (
            f"train.compile = true: parallel.schedule = {schedule.name} puts off the gradients of weights, and a "
            "compiled block's backward has both gradients in one graph; try "
            f"parallel.schedule={schedule.whole_backward}, or train.compile=false"
        )
    if recompute == "selective":
        yield (
            "train.compile = true: the compiler itself chooses what to compute again inside a block, and "
            "parallel.recompute = selective would be passed over; try parallel.recompute=none, or full"
        )


def batch_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each number of sequences that does not divide over the data ranks and their microbatches."""
    parallel, train = recipe.parallel, recipe.train
    slice_ = parallel.dp * parallel.microbatch_size  # sequences that one microbatch takes over all data ranks
    product = f"data ranks {parallel.dp} x parallel.microbatch_size {parallel.microbatch_size} = {slice_}"
    batch = train.global_batch_size
    if batch % slice_:
        tries = any_of(multiples_near(batch, slice_))
        yield f"train.global_batch_size = {batch}: must be a multiple of {product}; try {tries}"
    if train.eval_every is not None and train.eval_sequences % slice_:
        tries = any_of(multiples_near(train.eval_sequences, slice_))
        yield f"train.eval_sequences = {train.eval_sequences}: must be a multiple of {product}; try {tries}"


def batch_warmup_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each size of the batch that does not divide over the layout, and one if the last rise does not end
    at the full size."""
    parallel, train = recipe.parallel, recipe.train
    start, steps, full = train.batch_warmup_start, train.batch_warmup_steps, train.global_batch_size
    slice_ = parallel.dp * parallel.microbatch_size
    if start is None:
        given = {"batch_warmup_steps": steps, "batch_warmup_increment": train.batch_warmup_increment}
        for key, value in given.items():
            if value is not None:
                yield (
                    f"train.{key} = {value}: needs the batch that the warm-up starts with; "
                    f"try train.batch_warmup_start={slice_}"
                )
        return
    if steps is None:
        yield f"train.batch_warmup_start = {start}: needs train.batch_warmup_steps; try {max(1, train.steps // 10)}"
    increment = train.batch_warmup_increment or start
    product = f"data ranks {parallel.dp} x parallel.microbatch_size {parallel.microbatch_size} = {slice_}"
    for key, value in {"start": start, "increment": increment}.items():
        if value % slice_:
            tries = any_of(multiples_near(value, slice_))
            yield f"train.batch_warmup_{key} = {value}: must be a multiple of {product}; try {tries}"
    if start > full:
        yield f"train.batch_warmup_start = {start}: must be at most train.global_batch_size = {full}; try {slice_}"
    elif (full - start) % increment:
        steps_up = [d for d in divisors_near(full - start, increment) if full % slice_ == d % slice_ == 0]
        yield (
            f"train.batch_warmup_increment = {increment}: must divide train.global_batch_size - "
            f"train.batch_warmup_start = {full - start}; try {any_of(steps_up or [slice_])}"
        )

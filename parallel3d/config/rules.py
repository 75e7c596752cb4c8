"""Rules that relate several keys of a recipe. The trainer, the planner, `shard()` and the layers
share them.

Each rule is a function that yields one line per violation: the key, its value, the rule, and a
value that works. `schema` checks each value on its own, and `rules_layout` the model and its
layout. This file has all other rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from operator import attrgetter
from pathlib import Path

from parallel3d.config.attention_kernels import AttentionDevice, attention_errors
from parallel3d.config.example_values import any_of, multiple_from, multiples_near, nearest
from parallel3d.config.hugging_face import family_of
from parallel3d.config.mixture import mixture_errors
from parallel3d.config.recipe import READ_IF, Recipe
from parallel3d.config.rules_layout import (
    at_most,
    batch_errors,
    expert_errors,
    model_errors,
    parallel_errors,
    rope_errors,
    rule,
    schedule_errors,
    sharding_errors,
)
from parallel3d.config.schema import KEYS, range_errors
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError
from parallel3d.shard_sizes import divisors

_MOST_PROBLEMS = 5  # Maximum number of problems that an error lists.
# Largest beta or momentum with bf16 states. A step moves a running mean by 1 - beta of its distance
# from the new value, and bf16 cannot represent relative changes below 1/512.
_LARGEST_BF16_BETA = 0.99
_BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end-of-text token
# The condition under which each key is used: another key and its values.
_CONDITIONS = {key: condition for condition, keys in READ_IF.items() for key in keys.split()}
_INSIDE_A_REPLICA = {hybrid: strategy for strategy, hybrid in HYBRID_OF.items()}


def validate(recipe: Recipe) -> None:
    """Checks the ranges of `recipe` and then the rules between keys. Raises one `ConfigError` for
    the first of these two checks that fails."""
    refuse(range_errors(recipe))
    check_rules(recipe)


def check_rules(recipe: Recipe) -> None:
    """Raises one `ConfigError` for all rules between keys that `recipe` violates, of which it lists
    the first 5. Ranges must have been checked before."""
    checks = (
        unread_errors,
        model_errors,
        rope_errors,
        parallel_errors,
        expert_errors,
        schedule_errors,
        batch_errors,
        mixture_errors,
        local_sgd_errors,
        offload_errors,
        train_errors,
        data_errors,
        file_errors,
        logging_errors,
        optimizer_errors,
    )
    lines = [line for check in checks for line in check(recipe)]
    # With device = auto, the worker repeats this check for the GPU that it finds.
    if recipe.train.device == "cuda":
        lines += attention_errors(recipe, AttentionDevice("cuda"))
    is_apart = recipe.local_sgd.sync_every is not None
    parallel = recipe.of_one_replica.parallel if is_apart else recipe.parallel
    refuse([*lines, *sharding_errors(parallel)])


def refuse(problems: list[str]) -> None:
    """Raises a `ConfigError` that lists the first few of `problems` and counts the rest. Does
    nothing if there are none."""
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


def fit_to_workers(recipe: Recipe, workers: int) -> Recipe:
    """Adapts the recipe to the number of workers that the launcher has started.

    With `parallel.elastic`, only dp_shard changes. The global batch stays the same, so losses agree
    to rounding. Raises ConfigError if no dp_shard fits, or if the layout needs a different number
    of workers and is not elastic."""
    parallel = recipe.parallel
    train = recipe.train
    if workers == parallel.world_size:
        return recipe
    if not parallel.elastic:
        raise ConfigError(
            f"WORLD_SIZE = {workers}: the layout needs {product(parallel.axes)} workers; start "
            "that many, change the layout, or try parallel.elastic=true, which sets dp_shard"
        )
    each = parallel.world_size // parallel.dp_shard
    dp_shard, rest = divmod(workers, each)
    fault = f"must be a multiple of {each}, the workers per data-parallel shard"
    if dp_shard and not rest:
        try:
            return _with_dp_shard(recipe, dp_shard)
        except ConfigError as error:
            broken = str(error).partition("\n")[0].partition("; try ")[0]
            fault = f"gives dp_shard = {dp_shard}, but {broken}"
    fitting = []
    for number in divisors(train.global_batch_size):
        with suppress(ConfigError):
            _with_dp_shard(recipe, number)
            fitting.append(each * number)
    numbers = any_of(nearest(fitting, workers))
    raise ConfigError(f"WORLD_SIZE = {workers}: {fault}; try {numbers} workers")


def _with_dp_shard(recipe: Recipe, dp_shard: int) -> Recipe:
    changed = replace(recipe, parallel=replace(recipe.parallel, dp_shard=dp_shard))
    validate(changed)
    return changed


def product(axes: Mapping[str, int]) -> str:
    """Formats the sizes of a layout, as in pp 2 x dp_shard 2 x tp 2 = 8."""
    factors = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1"
    return f"{factors} = {prod(axes.values())}"


def unread_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each key that is set but would not be used, so that no option is
    silently ignored."""
    for name, condition in _CONDITIONS.items():
        other, *values = condition.split()
        is_absent = recipe.model.rope_scaling is None and name.startswith("model.rope_scaling.")
        # A custom model class checks its own keys (`models.custom`).
        if is_absent or (recipe.model.is_custom and other == "model.architecture"):
            continue
        value, found = attrgetter(name, other)(recipe)
        wanted = other
        is_read = found != KEYS[other].default
        if isinstance(found, str):
            wanted = f"{other} = {any_of(values)}"
            is_read = found in values
        if value == KEYS[name].default or is_read:
            continue
        said = f"{name} = {shown(value)}" if isinstance(value, str | int | float) else name
        yield (
            f"{said}: only used with {wanted}, but it is {shown(found)}; try {other}={values[0]}, "
            f"or remove {name}"
        )


@rule
def local_sgd_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each setting of local SGD that conflicts with the layout or the
    length of the run."""
    local = recipe.local_sgd
    parallel = recipe.parallel
    if local.sync_every is None:
        return
    if parallel.elastic:
        yield (
            "<parallel.elastic>: cannot be combined with <local_sgd.sync_every>, because it "
            "would move ranks between replicas; try parallel.elastic=false"
        )
    if parallel.dp_replicate == 1:
        yield (
            "<local_sgd.sync_every>: requires at least 2 replicas, but <parallel.dp_replicate>; "
            "try parallel.dp_replicate=2, or local_sgd.sync_every=null"
        )
    if parallel.sharding in _INSIDE_A_REPLICA:
        yield (
            "<parallel.sharding>: reduces gradients over parallel.dp_replicate in every step, "
            f"but <local_sgd.sync_every>; try {_INSIDE_A_REPLICA[parallel.sharding]}"
        )
    steps = recipe.train.steps
    yield from at_most(recipe, "local_sgd.sync_every", "train.steps", max(1, steps // 10))
    if local.nesterov and local.outer_momentum == 0:
        yield (
            "<local_sgd.nesterov>: requires momentum, but <local_sgd.outer_momentum>; try "
            "local_sgd.nesterov=false, or local_sgd.outer_momentum=0.9"
        )


@rule
def offload_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each feature that sends parameters or momentum between GPUs, because
    offloading keeps them on the CPU."""
    if not recipe.parallel.offload:
        return
    if recipe.optimizer.name == "muon":
        yield (
            "<parallel.offload>: keeps momentum on the CPU, but <optimizer.name> sends it "
            "between GPUs; try optimizer.name=adamw, or parallel.offload=false"
        )
    if recipe.local_sgd.sync_every is not None:
        yield (
            "<parallel.offload>: keeps parameters on the CPU, but <local_sgd.sync_every> sends "
            "them between GPUs; try local_sgd.sync_every=null, or parallel.offload=false"
        )


@rule
def train_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each violated rule of the learning rate, evaluation sets, rollbacks
    and samples."""
    train = recipe.train
    optimizer = recipe.optimizer
    end = "train.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    last = optimizer.decay_steps or train.steps
    yield from at_most(recipe, "optimizer.warmup_steps", end, last // 10)
    yield from at_most(recipe, "optimizer.decay_start", end, last * 9 // 10)
    yield from at_most(recipe, "optimizer.warmup_steps", "optimizer.decay_start", 0)
    if optimizer.schedule == "wsd" and optimizer.decay_start is None:
        yield (
            "<optimizer.schedule>: requires optimizer.decay_start, the last step at the peak "
            f"learning rate; try optimizer.decay_start={last * 9 // 10}"
        )
    if optimizer.schedule == "range_test" and optimizer.min_lr_ratio == 0:
        yield (
            "<optimizer.min_lr_ratio>: must be above 0 for a range test, whose learning rate "
            "begins at this fraction of its end; try 1e-6"
        )
    names = [each.name for each in recipe.data.evaluation]
    for index, name in enumerate(names):
        if not re.fullmatch(r"[\w.-]+", name) or name in ("validation", *names[:index]):
            yield (
                f"data.evaluation[{index}].name = {name}: must contain only letters, digits, -, _ "
                f"and ., must be unique, and must not be validation; try set-{index + 1}"
            )
    if train.on_spike == "rollback" and recipe.checkpoint.every is None:
        yield (
            "<train.on_spike>: requires checkpoints, but <checkpoint.every>; try "
            "checkpoint.every=100"
        )
    yield from at_most(recipe, "train.sample_top_k", "model.vocab", "1 (greedy)")


@rule
def data_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each setting of the data that conflicts with another one."""
    data = recipe.data
    vocab = recipe.model.vocab
    if data.tokenizer == "bytes" and data.source != "tokens":
        if vocab < _BYTE_TOKENIZER_IDS:
            yield (
                f"<model.vocab>: must be at least {_BYTE_TOKENIZER_IDS}, the number of token IDs "
                f"of <data.tokenizer>; try {multiple_from(_BYTE_TOKENIZER_IDS, recipe.parallel.tp)}"
            )
        if data.end_of_text is not None:
            yield (
                "<data.end_of_text>: must be null with <data.tokenizer>; try data.end_of_text=null"
            )
    if data.documents == "mask" and recipe.model.attention_dropout:
        yield (
            "<data.documents>: is not supported with <model.attention_dropout>; try "
            "model.attention_dropout=0, or data.documents=join"
        )
    for token in data.ignore_token_ids:
        if not 0 <= token < vocab:
            yield (
                f"<data.ignore_token_ids>: {token} is not a token ID, because <model.vocab>; try "
                f"IDs from 0 to {vocab - 1}"
            )
    for index, each in enumerate(data.skip):
        if each.last < each.first:
            yield (
                f"data.skip[{index}].last = {each.last}: must not be below first = {each.first}; "
                f"try {{first: {each.last}, last: {each.first}}}"
            )
    if data.source != "stdlib" and not data.path and not data.sources:
        yield "<data.path>: <data.source> requires a file or a folder; try data.path=corpus"


@rule
def file_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each violated rule of checkpoints and folders."""
    checkpoint = recipe.checkpoint
    run_dir = recipe.run_dir
    start = recipe.checkpoint.start_from
    every = checkpoint.every
    keep_every = checkpoint.keep_every
    if every is not None and keep_every is not None and keep_every % every:
        tries = any_of(multiples_near(keep_every, every))
        yield f"<checkpoint.keep_every>: must be a multiple of <checkpoint.every>; try {tries}"
    if checkpoint.export != "none":
        try:
            family_of(recipe.model)
        except ConfigError as error:
            yield f"{error}; try that, or checkpoint.export=none"
    if start is None:
        return
    if checkpoint.resume not in ("none", "auto"):
        yield (
            "<checkpoint.resume>: resumes a run, but <checkpoint.start_from> starts a new one; "
            "try checkpoint.resume=auto, or checkpoint.start_from=null"
        )
    elif run_dir is not None and Path(start).resolve().is_relative_to(Path(run_dir).resolve()):
        yield (
            "<checkpoint.start_from>: must not be inside <run_dir>, the folder of the new run; "
            f"try run_dir={run_dir}-2"
        )


@rule
def logging_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each setting of timelines and profiles outside the steps or ranks of
    the run."""
    logging = recipe.logging
    steps = recipe.train.steps
    ranks = recipe.parallel.world_size
    yield from at_most(recipe, "logging.timeline", "train.steps", steps)
    first, last = logging.profile_steps or (1, steps)
    if not 1 <= first <= last <= steps:
        yield (
            "<logging.profile_steps>: must be a first and a last step between 1 and <train.steps>; "
            f"try [{min(10, steps)},{min(12, steps)}]"
        )
    if any(rank >= ranks for rank in logging.profile_ranks):
        yield (
            f"<logging.profile_ranks>: the layout has {ranks} ranks; try ranks from 0 to "
            f"{ranks - 1}"
        )


@rule
def optimizer_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each violated rule of the keys of the optimizer."""
    config = recipe.optimizer.resolved
    if config.name == "sgd" and config.nesterov and config.momentum == 0:
        yield (
            "<optimizer.nesterov>: requires momentum, but <optimizer.momentum>; try "
            "optimizer.momentum=0.9"
        )
    if config.state_dtype != "bf16":
        return
    limit = f"at most {_LARGEST_BF16_BETA} with <optimizer.state_dtype>, or bf16 loses updates"
    if config.name != "sgd" and max(config.betas) > _LARGEST_BF16_BETA:
        yield f"<optimizer.betas>: must be {limit}; try [0.9, 0.95]"
    if (config.momentum or 0) > _LARGEST_BF16_BETA:
        yield f"<optimizer.momentum>: must be {limit}; try 0.95"

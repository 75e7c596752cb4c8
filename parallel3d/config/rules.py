"""The rules between keys: the one registry that the trainer, the planner, `shard()` and the layers
read.

Each rule is a function that yields one line for each value that breaks it: the key, its value, the
rule, and a value that works. `schema` checks each value on its own, `rules_layout` the model and
its layout, and this file all else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from operator import attrgetter
from pathlib import Path

from parallel3d.config.attention_kernels import AttentionDevice, attention_errors
from parallel3d.config.hugging_face import family_of
from parallel3d.config.mixture import mixture_errors
from parallel3d.config.recipe import READ_IF, Recipe
from parallel3d.config.rules_layout import (
    at_most,
    batch_errors,
    model_errors,
    parallel_errors,
    rope_errors,
    rule,
    schedule_errors,
    sharding_errors,
)
from parallel3d.config.schema import KEYS, range_errors
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.config.suggestions import any_of, multiple_from, multiples_near, nearest
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError
from parallel3d.shard_sizes import divisors

_MOST_PROBLEMS = 5  # lines of an error; further problems are counted
# A step moves a running mean by 1 - beta of its distance from the new value, and bf16 rounds away a
# change below 1/512.
_LARGEST_BF16_BETA = 0.99
_BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end of a text
# key -> the key and the values that it is read with
_CONDITIONS = {key: condition for condition, keys in READ_IF.items() for key in keys.split()}
_INSIDE_A_REPLICA = {hybrid: strategy for strategy, hybrid in HYBRID_OF.items()}


def validate(recipe: Recipe) -> None:
    """Raises one `ConfigError` with a line for each range and each rule that `recipe` breaks."""
    refuse(range_errors(recipe))
    check_rules(recipe)


def check_rules(recipe: Recipe) -> None:
    """Raises one `ConfigError` with a line for each rule between keys that `recipe` breaks. Its
    numbers are in range."""
    checks = (
        unread_errors,
        model_errors,
        rope_errors,
        parallel_errors,
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
    # a worker that finds a GPU by itself asks again, about that one
    if recipe.train.device == "cuda":
        lines += attention_errors(recipe, AttentionDevice("cuda"))
    is_apart = recipe.local_sgd.sync_every is not None
    parallel = recipe.of_one_replica.parallel if is_apart else recipe.parallel
    refuse([*lines, *sharding_errors(parallel)])


def refuse(problems: list[str]) -> None:
    """Raises a `ConfigError` of all `problems`, the first few of them in full; returns where the
    list is empty."""
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


def fit_to_workers(recipe: Recipe, workers: int) -> Recipe:
    """Returns the recipe for so many workers, which the launcher has started. An elastic one keeps
    tp, pp and dp_replicate and gets another dp_shard; the global batch stays, so that the losses
    do, to rounding. Raises ConfigError where the layout needs another number of workers, with those
    that it could have."""
    parallel = recipe.parallel
    train = recipe.train
    if workers == parallel.world_size:
        return recipe
    if not parallel.elastic:
        raise ConfigError(
            f"WORLD_SIZE = {workers}: parallel needs {product(parallel.axes)} workers; start that "
            "many, change the layout, or try parallel.elastic=true, which sets dp_shard"
        )
    each = parallel.world_size // parallel.dp_shard
    dp_shard, rest = divmod(workers, each)
    fault = f"must be a multiple of {each}, which parallel.elastic keeps"
    if dp_shard and not rest:
        try:
            return _with_dp_shard(recipe, dp_shard)
        except ConfigError as error:
            broken = str(error).partition("\n")[0].partition("; try ")[0]
            fault = f"makes dp_shard = {dp_shard}, and then {broken}"
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
    """Returns a layout as a product: pp 2 x dp_shard 2 x tp 2 = 8."""
    factors = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1"
    return f"{factors} = {prod(axes.values())}"


def unread_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each key that is set and would not be read, so that no option is silently
    ignored."""
    for name, condition in _CONDITIONS.items():
        other, *values = condition.split()
        is_absent = recipe.model.rope_scaling is None and name.startswith("model.rope_scaling.")
        # `models.custom` sees what a class of the user's own reads.
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
            f"{said}: needs {wanted}, and that is {shown(found)}; try {other}={values[0]}, or drop "
            f"{name}"
        )


@rule
def local_sgd_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of local SGD that does not fit the layout, the model or the length
    of the run."""
    local = recipe.local_sgd
    parallel = recipe.parallel
    if local.sync_every is None:
        return
    if parallel.elastic:
        yield (
            "<parallel.elastic>: would move ranks between replicas, which <local_sgd.sync_every> "
            "keeps apart; try parallel.elastic=false"
        )
    if parallel.dp_replicate == 1:
        yield (
            "<local_sgd.sync_every>: needs replicas, and <parallel.dp_replicate>; try "
            "parallel.dp_replicate=2, or local_sgd.sync_every=null"
        )
    if parallel.sharding in _INSIDE_A_REPLICA:
        yield (
            "<parallel.sharding>: sums gradients over parallel.dp_replicate in every step, which "
            f"<local_sgd.sync_every> is to avoid; try {_INSIDE_A_REPLICA[parallel.sharding]}"
        )
    steps = recipe.train.steps
    yield from at_most(recipe, "local_sgd.sync_every", "train.steps", max(1, steps // 10))
    if local.nesterov and local.outer_momentum == 0:
        yield (
            "<local_sgd.nesterov>: needs momentum, and <local_sgd.outer_momentum>; try "
            "local_sgd.nesterov=false, or local_sgd.outer_momentum=0.9"
        )


@rule
def offload_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each section that sends parameters or momenta, which then are on the CPU."""
    if not recipe.parallel.offload:
        return
    if recipe.optimizer.name == "muon":
        yield (
            "<parallel.offload>: keeps momenta on the CPU, and <optimizer.name> sends them between "
            "GPUs; try optimizer.name=adamw, or parallel.offload=false"
        )
    if recipe.local_sgd.sync_every is not None:
        yield (
            "<parallel.offload>: keeps parameters on the CPU, and <local_sgd.sync_every> sends "
            "them between GPUs; try local_sgd.sync_every=null, or parallel.offload=false"
        )


@rule
def train_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each rule of the length of the run, its learning rate, its evaluations and its
    samples."""
    train = recipe.train
    optimizer = recipe.optimizer
    end = "train.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    last = optimizer.decay_steps or train.steps
    yield from at_most(recipe, "optimizer.warmup_steps", end, last // 10)
    yield from at_most(recipe, "optimizer.decay_start", end, last * 9 // 10)
    yield from at_most(recipe, "optimizer.warmup_steps", "optimizer.decay_start", 0)
    if optimizer.schedule == "wsd" and optimizer.decay_start is None:
        yield (
            "<optimizer.schedule>: needs the step up to which the rate stays at its peak; try "
            f"optimizer.decay_start={last * 9 // 10}"
        )
    if optimizer.schedule == "range_test" and optimizer.min_lr_ratio == 0:
        yield (
            "<optimizer.min_lr_ratio>: the rate of a range test rises from that share of its last; "
            "try 1e-6"
        )
    names = [each.name for each in recipe.data.evaluation]
    for index, name in enumerate(names):
        if not re.fullmatch(r"[\w.-]+", name) or name in ("validation", *names[:index]):
            yield (
                f"data.evaluation[{index}].name = {name}: must be of letters, digits, -, _ and ., "
                f"and neither validation nor the name of another set; try set-{index + 1}"
            )
    if train.on_spike == "rollback" and recipe.checkpoint.every is None:
        yield (
            "<train.on_spike>: goes back to a checkpoint, and <checkpoint.every>; try "
            "checkpoint.every=100"
        )
    yield from at_most(recipe, "train.sample_top_k", "model.vocab", "1, which is greedy")


@rule
def data_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of the data that contradicts another one."""
    data = recipe.data
    vocab = recipe.model.vocab
    if data.tokenizer == "bytes" and data.source != "tokens":
        if vocab < _BYTE_TOKENIZER_IDS:
            yield (
                f"<model.vocab>: must be at least {_BYTE_TOKENIZER_IDS}, the ids of "
                "<data.tokenizer>; try "
                f"{multiple_from(_BYTE_TOKENIZER_IDS, recipe.parallel.tp)}"
            )
        if data.end_of_text is not None:
            yield (
                "<data.end_of_text>: <data.tokenizer> has one of its own; try data.end_of_text=null"
            )
    if data.documents == "mask" and recipe.model.attention_dropout:
        yield (
            "<data.documents>: computes each document by itself, for which "
            "<model.attention_dropout> has no kernel; try model.attention_dropout=0, or "
            "data.documents=join"
        )
    for token in data.ignore_token_ids:
        if not 0 <= token < vocab:
            yield (
                f"<data.ignore_token_ids>: {token} is no token of <model.vocab>; try ids from 0 to "
                f"{vocab - 1}"
            )
    for index, each in enumerate(data.skip):
        if each.last < each.first:
            yield (
                f"data.skip[{index}].last = {each.last}: comes before its first, {each.first}; try "
                f"{{first: {each.last}, last: {each.first}}}"
            )
    if data.source != "stdlib" and not data.path and not data.sources:
        yield "<data.path>: <data.source> needs a file or a folder; try data.path=corpus"


@rule
def file_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each rule of checkpoints and folders."""
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
            "<checkpoint.resume>: resumes a run, and <checkpoint.start_from> begins a new one; try "
            "checkpoint.resume=auto, or checkpoint.start_from=null"
        )
    elif run_dir is not None and Path(start).resolve().is_relative_to(Path(run_dir).resolve()):
        yield (
            "<checkpoint.start_from>: lies in <run_dir>, where the new run is to be; try "
            f"run_dir={run_dir}-2"
        )


@rule
def logging_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of profiles that means nothing in this run."""
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
    """One line for each rule of the optimizer's own keys."""
    config = recipe.optimizer.resolved
    if config.name == "sgd" and config.nesterov and config.momentum == 0:
        yield (
            "<optimizer.nesterov>: needs momentum, and <optimizer.momentum>; try "
            "optimizer.momentum=0.9"
        )
    if config.state_dtype != "bf16":
        return
    limit = f"at most {_LARGEST_BF16_BETA} with <optimizer.state_dtype>, or bf16 rounds steps away"
    if config.name != "sgd" and max(config.betas) > _LARGEST_BF16_BETA:
        yield f"<optimizer.betas>: must be {limit}; try [0.9, 0.95]"
    if (config.momentum or 0) > _LARGEST_BF16_BETA:
        yield f"<optimizer.momentum>: must be {limit}; try 0.95"

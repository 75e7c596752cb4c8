"""The rules that a recipe must keep beyond the types of its values: the one registry that the trainer, the planner,
`shard()` and the layers read.

Each rule is a pure function that yields one line for each value that breaks it: the key, its value, the rule, and a
value that would do. `ranges` checks each number alone, `rules_layout` what must fit together in a model and its layout,
this file what an optimizer reads, which layouts can step in the backward, and what a run reads, records and writes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import prod
from operator import attrgetter
from pathlib import Path

from parallel3d.config.attention_kernels import AttentionDevice, attention_errors
from parallel3d.config.hugging_face import family_of
from parallel3d.config.mixture import mixture_errors
from parallel3d.config.ranges import any_of, multiple_from, multiples_near, nearest, range_errors
from parallel3d.config.recipe import OPTIMIZER_KEYS, ParallelConfig, Recipe
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
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError
from parallel3d.row_split import divisors
from parallel3d.schedules.registry import SCHEDULES

_MOST_PROBLEMS = 5  # lines of an error; further problems are counted
_MOST_NS_STEPS = 99  # the limit of torch.optim.Muon
# A step moves a running mean by 1 - beta of its distance from the new value, and bf16 rounds away a change below 1/512.
_LARGEST_BF16_BETA = 0.99
_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes of a name in a path, and of the path, on the usual file systems
_PATHS = {
    "run_dir": "run_dir=runs/mine",
    "data.path": "data.path=corpus.txt",
    "data.tokenizer": "data.tokenizer=bytes",
    "checkpoint.resume": "auto",
    "checkpoint.start_from": "null, or runs/mine",
}
_BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end of a text
_INSIDE_A_REPLICA = {hybrid: strategy for strategy, hybrid in HYBRID_OF.items()}


def validate(recipe: Recipe) -> None:
    """Raises one `ConfigError` with a line for each rule that `recipe` breaks.

    The ranges come first, because what must divide what is only asked of numbers that are in range."""
    refuse([*range_errors(recipe)])
    checks = (
        model_errors,
        rope_errors,
        parallel_errors,
        schedule_errors,
        batch_errors,
        local_sgd_errors,
        run_errors,
        mixture_errors,
    )
    lines = [line for check in checks for line in check(recipe)]
    if recipe.train.device == "cuda":  # a worker that finds a GPU by itself asks again, about that one
        lines += attention_errors(recipe, AttentionDevice("cuda"))
    refuse([*lines, *sharding_errors(recipe.of_one_replica.parallel)])
    refuse([*optimizer_errors(recipe), *step_in_backward_errors(recipe)])


def refuse(problems: list[str]) -> None:
    """Raises a `ConfigError` of all `problems`, the first few of them in full; returns where the list is empty."""
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


def fit_to_workers(recipe: Recipe, workers: int) -> Recipe:
    """Returns the recipe for so many workers, which the launcher has started. An elastic one keeps tp, pp and
    dp_replicate and gets another dp_shard; the global batch stays, so that the losses do, to rounding. Raises
    ConfigError where the layout needs another number of workers, with those that it could have."""
    parallel, train = recipe.parallel, recipe.train
    if workers == parallel.world_size:
        return recipe
    if not parallel.elastic:
        raise ConfigError(
            f"WORLD_SIZE = {workers}: parallel needs {product(parallel.axes)} workers; start that many, change the "
            "layout, or try parallel.elastic=true, which sets dp_shard"
        )
    fixed = {axis: size for axis, size in parallel.axes.items() if axis != "dp_shard"}
    each, most = prod(fixed.values()), train.global_batch_size // (parallel.dp_replicate * parallel.microbatch_size)
    fitting = [dp_shard for dp_shard in divisors(most) if not _problem(recipe, dp_shard)]
    dp_shard, rest = divmod(workers, each)
    if dp_shard in fitting and not rest:
        return _with_dp_shard(recipe, dp_shard)
    reason = f"must be a multiple of {product(fixed)}, which parallel.elastic keeps"
    if dp_shard and not rest:
        reason = f"makes dp_shard = {dp_shard}, and then {_problem(recipe, dp_shard)}"
    numbers = any_of(nearest([each * dp_shard for dp_shard in fitting], workers))
    raise ConfigError(f"WORLD_SIZE = {workers}: {reason}; try {numbers} workers")


def product(axes: Mapping[str, int]) -> str:
    """Returns a layout as a product: pp 2 x dp_shard 2 x tp 2 = 8."""
    factors = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1"
    return f"{factors} = {prod(axes.values())}"


def _with_dp_shard(recipe: Recipe, dp_shard: int) -> Recipe:
    return replace(recipe, parallel=replace(recipe.parallel, dp_shard=dp_shard))


def _problem(recipe: Recipe, dp_shard: int) -> str:
    """Returns the first rule that the recipe breaks with this dp_shard; nothing where it breaks none."""
    try:
        validate(_with_dp_shard(recipe, dp_shard))
    except ConfigError as error:
        return str(error).partition("\n")[0].partition("; try ")[0]
    return ""


@rule
def local_sgd_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of local SGD that does not fit the layout, the model or the length of the run."""
    local, steps = recipe.local_sgd, recipe.train.steps
    every = local.sync_every
    if every is None:
        tries = f"local_sgd.sync_every={min(20, steps)} beside it, or drop it"
        for key in fields(local):
            if getattr(local, key.name) != key.default:
                yield f"<local_sgd.{key.name}>: means nothing while gradients are summed in every step; try {tries}"
        return
    if recipe.parallel.elastic:
        words = (
            "would give the ranks of a lost node to other replicas, across the slow links that <local_sgd.sync_every>"
        )
        yield f"<parallel.elastic>: {words} spares; try parallel.elastic=false"
    if recipe.parallel.dp_replicate == 1:
        tries = "parallel.dp_replicate=2, or local_sgd.sync_every=null"
        yield f"<local_sgd.sync_every>: needs replicas that train apart, and <parallel.dp_replicate>; try {tries}"
    if recipe.parallel.sharding in _INSIDE_A_REPLICA:
        words = "sums gradients over parallel.dp_replicate in every step, which <local_sgd.sync_every> is to avoid"
        yield f"<parallel.sharding>: {words}; try {_INSIDE_A_REPLICA[recipe.parallel.sharding]}"
    at_the_end = "replicas would meet but at the end"
    yield from at_most(recipe, "local_sgd.sync_every", "train.steps", max(1, steps // 10), because=at_the_end)
    most = min(recipe.model.layers, every)
    yield from at_most(recipe, "local_sgd.fragments", "model.layers", most, because="fragments are made of blocks")
    yield from at_most(recipe, "local_sgd.fragments", "local_sgd.sync_every", most, because="each has its own step")
    if local.overlap_steps >= every:
        words = "must be below <local_sgd.sync_every>, or a fragment leaves again before it has arrived"
        yield f"<local_sgd.overlap_steps>: {words}; try {every // 2}"
    if local.nesterov and local.outer_momentum == 0:
        tries = "local_sgd.nesterov=false, or local_sgd.outer_momentum=0.9"
        yield f"<local_sgd.nesterov>: needs momentum, and <local_sgd.outer_momentum>; try {tries}"


@rule
def run_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of the run that contradicts another one or is empty."""
    train, optimizer, data, vocab = recipe.train, recipe.optimizer, recipe.data, recipe.model.vocab
    if data.tokenizer == "bytes" and data.source != "tokens" and vocab < _BYTE_TOKENIZER_IDS:
        tries = str(multiple_from(_BYTE_TOKENIZER_IDS, recipe.parallel.tp))
        yield f"<model.vocab>: must be at least {_BYTE_TOKENIZER_IDS}, the ids of <data.tokenizer>; try {tries}"
    if data.tokenizer == "bytes" and data.source != "tokens" and data.end_of_text is not None:
        yield "<data.end_of_text>: <data.tokenizer> has one of its own; try data.end_of_text=null"
    if optimizer.stochastic_rounding and train.precision != "bf16_pure":
        words = "keeps its weights in float32, where there is nothing to round"
        yield f"<optimizer.stochastic_rounding>: <train.precision> {words}; try train.precision=bf16_pure"
    if data.documents == "mask" and recipe.model.attention_dropout:
        words = "computes each document by itself, for which <model.attention_dropout> has no kernel"
        yield f"<data.documents>: {words}; try model.attention_dropout=0, or data.documents=join"
    for token in data.ignore_token_ids:
        if not 0 <= token < vocab:
            yield f"<data.ignore_token_ids>: {token} is no token of <model.vocab>; try ids from 0 to {vocab - 1}"
    for index, each in enumerate(data.skip):
        if each.last < each.first:
            words = f"comes before its first, {each.first}"
            yield f"data.skip[{index}].last = {each.last}: {words}; try {{first: {each.last}, last: {each.first}}}"
    end = "train.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    last = optimizer.decay_steps or train.steps
    yield from at_most(recipe, "optimizer.warmup_steps", end, last // 10)
    yield from rate_errors(recipe, end, last)
    yield from evaluation_errors(recipe)
    for key in ("early_stop_min_delta", "early_stop_set"):
        if train.early_stop_patience is None and getattr(train, key) not in (None, 0.0):
            yield f"<train.{key}>: means nothing without early stopping; try train.early_stop_patience=3 beside it"
    if train.early_stop_patience is not None and train.eval_every is None:
        yield "<train.early_stop_patience>: counts evaluations, and <train.eval_every>; try train.eval_every=100"
    yield from at_most(recipe, "logging.timeline", "train.steps", train.steps)
    yield from at_most(recipe, "train.sample_top_k", "model.vocab", "1, which is greedy")
    if train.sample_top_k == 1:
        for key in ("sample_top_p", "sample_temperature", "sample_seed"):
            if getattr(train, key) not in (1.0, None):
                words = "means nothing where <train.sample_top_k> takes the likeliest token"
                yield f"<train.{key}>: {words}; try train.sample_top_k={min(40, vocab)} beside it"
    if train.on_nonfinite == "stop" and train.nonfinite_in_a_row != type(train).nonfinite_in_a_row:
        words = "means nothing where the first such step ends the run"
        yield f"<train.nonfinite_in_a_row>: {words}; try train.on_nonfinite=skip beside it"
    yield from spike_errors(recipe)
    yield from logging_errors(recipe)
    is_named = data.path or data.sources
    if data.source == "text" and not is_named:
        yield "<data.path>: <data.source> needs a file or a folder; try data.path=corpus.txt"
    if data.source == "tokens" and not is_named:
        yield "<data.path>: <data.source> needs a folder with a tokens.json, or Megatron's PREFIX; try data.path=tokens"
    for key, tries in _PATHS.items():
        path = attrgetter(key)(recipe) or ""
        try:
            path.encode()
            longest = max((len(os.fsencode(name)) for name in Path(path).parts), default=0)
        except UnicodeEncodeError:
            words = f"must be text in UTF-8, and in this locale's {sys.getfilesystemencoding()}"
            yield f"<{key}>: {words}; try {tries}, or LC_ALL=C.UTF-8"
            return
        if "\0" in path or len(path) > _LONGEST_PATH or longest > _LONGEST_NAME:
            yield f"<{key}>: can be no path, which has names of at most {_LONGEST_NAME} bytes; try {tries}"
            return
    yield from _kept_errors(recipe)
    if not recipe.checkpoint.resume:
        yield "checkpoint.resume = '': must be none, auto or the path of a checkpoint; try auto"
    yield from start_errors(recipe)
    yield from _export_errors(recipe)
    if train.sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt = '': a sample continues some text; try train.sample_prompt='def '"
    run_dir = recipe.run_dir
    if run_dir is not None and not run_dir.strip():
        yield "run_dir = '': must be a folder; try run_dir=runs/mine"
    elif run_dir is not None and Path(run_dir).resolve() == Path(Path(run_dir).resolve().anchor):
        yield "<run_dir>: is the root of the file system, and a run has a folder of its own; try run_dir=runs/mine"


def spike_errors(recipe: Recipe) -> Iterator[str]:
    """One line, for a `rule` to yield, for each setting of `train.on_spike` that means nothing or cannot be done."""
    train = recipe.train
    if train.on_spike == "rollback" and recipe.checkpoint.every is None:
        yield "<train.on_spike>: goes back to a checkpoint, and <checkpoint.every>; try checkpoint.every=100"
    for key, readers in (("spike_steps", ["rollback"]), ("spikes_in_a_row", ["skip", "rollback"])):
        if train.on_spike not in readers and getattr(train, key) != getattr(type(train), key):
            words = f"means nothing with <train.on_spike>; try train.on_spike={any_of(readers)} beside it"
            yield f"<train.{key}>: {words}"


def start_errors(recipe: Recipe) -> Iterator[str]:
    """One line, for a `rule` to yield, where a run is to begin with weights that it cannot begin with."""
    start, run_dir = recipe.checkpoint.start_from, recipe.run_dir
    if start is None:
        return
    if not start.strip():
        yield "checkpoint.start_from = '': must be the path of a checkpoint; try runs/mine, or null"
    elif recipe.checkpoint.resume not in ("none", "auto"):
        words = "goes on with a run, and <checkpoint.start_from> begins a new one"
        yield f"<checkpoint.resume>: {words}; try checkpoint.resume=auto, or checkpoint.start_from=null"
    elif run_dir is not None and Path(start).resolve().is_relative_to(Path(run_dir).resolve()):
        words = "lies in <run_dir>, where the new run is to be"
        yield f"<checkpoint.start_from>: {words}; try run_dir={run_dir}-2"


def _kept_errors(recipe: Recipe) -> Iterator[str]:
    """One line, for a `rule` to yield, for each setting by which a run would not keep what it is asked to keep."""
    every, keep_every = recipe.checkpoint.every, recipe.checkpoint.keep_every
    if every is not None and keep_every is not None and keep_every % every:
        tries = any_of(multiples_near(keep_every, every))
        yield f"<checkpoint.keep_every>: must be a multiple of <checkpoint.every>; try {tries}"
    if every is not None and recipe.checkpoint.keep_best and recipe.train.eval_every is None:
        tries = f"train.eval_every={every}, or checkpoint.keep_best=0"
        yield f"<checkpoint.keep_best>: needs validation losses, and <train.eval_every>; try {tries}"


def _export_errors(recipe: Recipe) -> Iterator[str]:
    """One line, for a `rule` to yield, where a run could not export its model."""
    if recipe.checkpoint.export == "none":
        return
    if recipe.checkpoint.every is None:
        yield "<checkpoint.export>: exports checkpoints, and <checkpoint.every>; try checkpoint.every=100"
    try:
        family_of(recipe.model)
    except ConfigError as error:
        yield f"{error}; try that, or checkpoint.export=none"


def rate_errors(recipe: Recipe, end: str, last: int) -> Iterator[str]:
    """One line, for a `rule` to yield, for each key of the learning rate's schedule that does not fit the others. The
    decay ends at step `last`, which the key `end` says."""
    config = recipe.optimizer
    if config.schedule == "wsd":
        if config.decay_start is None:
            words = "needs the step up to which the rate stays at its peak"
            yield f"<optimizer.schedule>: {words}; try optimizer.decay_start={last * 9 // 10}"
            return
        yield from at_most(recipe, "optimizer.warmup_steps", "optimizer.decay_start", 0)
        yield from at_most(recipe, "optimizer.decay_start", end, last * 9 // 10)
        return
    for key in ("decay_start", "decay_shape"):
        if getattr(config, key) is not None:
            tries = f"optimizer.{key}=null, or optimizer.schedule=wsd"
            yield f"<optimizer.{key}>: <optimizer.schedule> has no use for it; try {tries}"
    if config.schedule == "range_test" and config.min_lr_ratio == 0:
        yield "<optimizer.min_lr_ratio>: the rate of a range test rises from that share of its last; try 1e-6"


def evaluation_errors(recipe: Recipe) -> Iterator[str]:
    """One line, for a `rule` to yield, for each evaluation set that would not be evaluated or not be told apart, and
    for early stopping by a set that there is not."""
    train, names = recipe.train, [each.name for each in recipe.data.evaluation]
    for index, name in enumerate(names):
        key = f"data.evaluation[{index}].name = {name}"
        if not re.fullmatch(r"[\w.-]+", name):
            yield f"{key}: must be of letters, digits, -, _ and ., because keys of metrics.jsonl have it; try wiki"
        elif name in ("validation", *names[:index]):
            words = "the part of the run's own data" if name == "validation" else "another set"
            yield f"{key}: is the name of {words}; try {name}-{index + 1}"
    if names and train.eval_every is None:
        yield "data.evaluation: has sets, and <train.eval_every> evaluates none of them; try train.eval_every=100"
    if train.early_stop_set is not None and train.early_stop_set not in names:
        tries = names[0] if names else "null, the part kept for validation"
        yield f"<train.early_stop_set>: is the name of no set of data.evaluation; try {tries}"


@rule
def logging_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of profiles and sinks that means nothing in this run."""
    logging, steps, ranks = recipe.logging, recipe.train.steps, recipe.parallel.world_size
    if logging.profile_steps is not None and not 1 <= logging.profile_steps[0] <= logging.profile_steps[1] <= steps:
        words = "must be a first and a last step between 1 and <train.steps>"
        yield f"<logging.profile_steps>: {words}; try [{min(10, steps)},{min(12, steps)}]"
    if any(rank >= ranks for rank in logging.profile_ranks):
        yield f"<logging.profile_ranks>: the layout has {ranks} ranks; try ranks from 0 to {ranks - 1}"
    if len(set(logging.sinks)) < len(logging.sinks):
        yield f"<logging.sinks>: names one twice; try {shown(list(dict.fromkeys(logging.sinks)))}"
    for key in ("project", "run_name"):
        if getattr(logging, key) is not None and not getattr(logging, key).strip():
            yield f"<logging.{key}>: must be a name; try logging.{key}=mine"


@rule
def optimizer_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each rule that the section breaks; its numbers are in range."""
    config = recipe.optimizer
    for key in fields(config):
        used_by = [name for name, keys in OPTIMIZER_KEYS.items() if key.name in keys]
        if used_by and config.name not in used_by and getattr(config, key.name) != key.default:
            tries = f"optimizer.{key.name}={shown(key.default)}, or optimizer.name={' or '.join(used_by)}"
            yield f"<optimizer.{key.name}>: <optimizer.name> has no use for it; try {tries}"
    if config.name == "sgd" and config.momentum == 0 and config.nesterov:
        yield "<optimizer.nesterov>: needs momentum, and <optimizer.momentum>; try optimizer.momentum=0.9"
    if config.name == "sgd" and config.momentum == 0 and config.state_dtype is not None:
        tries = "optimizer.state_dtype=null, or optimizer.momentum=0.9"
        yield f"<optimizer.state_dtype>: sgd without momentum has no states; try {tries}"
    if config.ns_steps is not None and config.ns_steps > _MOST_NS_STEPS:
        yield f"<optimizer.ns_steps>: must be at most {_MOST_NS_STEPS}; try 5"
    if config.state_dtype == "bf16":
        limit = f"with <optimizer.state_dtype> at most {_LARGEST_BF16_BETA}, or what a step adds is rounded away"
        if "betas" in OPTIMIZER_KEYS[config.name] and max(config.betas) > _LARGEST_BF16_BETA:
            yield f"<optimizer.betas>: must be {limit}; try [0.9, 0.95]"
        if config.momentum is not None and config.momentum > _LARGEST_BF16_BETA:
            yield f"<optimizer.momentum>: must be {limit}; try 0.95"


@rule
def step_in_backward_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting with which parameters cannot be stepped in the backward, or nothing is saved by it."""
    if not recipe.optimizer.step_in_backward:
        return
    train, layout = recipe.train, recipe.of_one_replica
    if train.grad_clip is not None:
        words = "needs the norm of the whole gradient before the first parameter is stepped"
        yield f"<optimizer.step_in_backward>: <train.grad_clip> {words}; try train.grad_clip=null"
    if train.precision == "fp16":
        words = "skips a step in which any gradient overflows, which is known when all are there"
        yield f"<optimizer.step_in_backward>: <train.precision> {words}; try train.precision=bf16"
    if train.on_nonfinite == "skip":
        words = "leaves out a step by its whole gradient, which is known when all parameters have been stepped"
        yield f"<optimizer.step_in_backward>: <train.on_nonfinite> {words}; try train.on_nonfinite=stop"
    if train.on_spike == "skip":
        words = "leaves out an update by the whole loss, which is known when all parameters have been stepped"
        yield f"<optimizer.step_in_backward>: <train.on_spike> {words}; try train.on_spike=rollback"
    if recipe.optimizer.name not in ("adamw", "sgd"):
        words = "exchanges something of many parameters at once in its step, and each would come alone"
        yield f"<optimizer.step_in_backward>: <optimizer.name> {words}; try optimizer.name=adamw"
    batch, tied = layout.train.global_batch_size, recipe.model.tied_embeddings
    for reason in _reasons_to_wait(layout.parallel, batch, tied):
        yield f"<optimizer.step_in_backward>: {reason}"


def can_step_in_backward(parallel: ParallelConfig, global_batch_size: int, *, tied_embeddings: bool) -> bool:
    """True if optimizer.step_in_backward works, and saves memory, in this layout."""
    return next(_reasons_to_wait(parallel, global_batch_size, tied_embeddings), None) is None


def _reasons_to_wait(parallel: ParallelConfig, global_batch_size: int, tied_embeddings: bool) -> Iterator[str]:
    """Yields why parameters cannot be stepped in the backward of a layout, each with a value that would do."""
    share, schedule = global_batch_size // parallel.dp, SCHEDULES[parallel.schedule]
    if parallel.strategy in HYBRID_OF.values() and parallel.dp_replicate > 1:
        words = "is torch's fully_shard, which holds all reduced gradients until its backward ends: nothing is saved"
        yield f"parallel.sharding = {parallel.strategy} {words}; try parallel.sharding=SHARD_OPTIMIZER"
    if (microbatches := share // parallel.microbatch_size) > 1:
        words = "microbatches are added up, so all of them are there until the last, and nothing is saved"
        yield f"the gradients of {microbatches} {words}; try parallel.microbatch_size={share}"
    if tied_embeddings and parallel.pp > 1:
        words = "sums a gradient over the first and the last stage when both are done"
        yield f"model.tied_embeddings = true with <parallel.pp> {words}; try parallel.pp=1"
    if schedule.splits_backward:
        tries = f"parallel.schedule={schedule.whole_backward}"
        yield f"<parallel.schedule> puts off the gradients of weights beyond the backward; try {tries}"


@rule
def warnings_for(recipe: Recipe) -> Iterator[str]:
    """One line for each setting that is allowed and seldom meant."""
    train, optimizer, data = recipe.train, recipe.optimizer, recipe.data
    if optimizer.schedule in ("constant", "range_test") and optimizer.decay_steps is not None:
        yield "<optimizer.decay_steps>: not used, because <optimizer.schedule> never comes down"
    elif optimizer.decay_steps is not None and optimizer.decay_steps < train.steps:
        lowest = f"{optimizer.lr * optimizer.min_lr_ratio:g}"
        words = "from there on the learning rate stays at its minimum"
        yield f"<optimizer.decay_steps>: shorter than <train.steps>; {words}, {lowest}"
    if train.precision != "fp16" and recipe.loss_scale != type(recipe.loss_scale)():
        yield "loss_scale: not used, because <train.precision> needs no scaling; try train.precision=fp16"
    every, compared = recipe.checkpoint.every, train.compare_replicas_every
    if every is not None and compared is not None and every % compared:
        words = (
            "a checkpoint may hold what no comparison has seen; a divisor of <checkpoint.every> compares before each"
        )
        yield f"<train.compare_replicas_every>: {words}"
    if train.batch_warmup_steps is not None and train.batch_warmup_steps > train.steps:
        full = train.global_batch_size
        yield f"<train.batch_warmup_steps>: more than <train.steps>; the batch never has its full size of {full}"
    for index, stage in enumerate(data.stages):
        if stage.from_step > train.steps:
            yield f"data.stages[{index}].from_step = {stage.from_step}: the run ends before, at <train.steps>"
    if data.source == "stdlib" and data.path is not None:
        yield "<data.path>: not read, because <data.source>; try data.source=text"

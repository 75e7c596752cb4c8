"""The rules that a recipe must keep beyond the types of its values: the one registry that the trainer, the planner,
`shard()` and the layers read.

Each rule is a pure function that yields one line for each value that breaks it: the key, its value, the rule, and a
value that would do. `ranges` checks each number alone; the `rules_` files check what must fit together in a layout and
in an optimizer, this file what a run reads, rounds, records and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from parallel3d.config.ranges import multiple_from, range_errors
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules_layout import (
    at_most,
    batch_errors,
    model_errors,
    parallel_errors,
    rule,
    schedule_errors,
    sharding_errors,
)
from parallel3d.config.rules_optimizer import optimizer_errors, step_in_backward_errors
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.errors import ConfigError

_MOST_PROBLEMS = 5  # lines of an error; further problems are counted
_BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end of a text
_INSIDE_A_REPLICA = {hybrid: strategy for strategy, hybrid in HYBRID_OF.items()}


def validate(recipe: Recipe) -> None:
    """Raises one `ConfigError` with a line for each rule that `recipe` breaks.

    The ranges come first, because what must divide what is only asked of numbers that are in range."""
    refuse([*range_errors(recipe)])
    layout = [line for check in (model_errors, parallel_errors) for line in check(recipe)]
    layout += sharding_errors(recipe.of_one_replica.parallel)
    refuse(
        layout
        + [line for check in (schedule_errors, batch_errors, local_sgd_errors, run_errors) for line in check(recipe)]
    )
    refuse([*optimizer_errors(recipe), *step_in_backward_errors(recipe)])


def refuse(problems: list[str]) -> None:
    """Raises a `ConfigError` of all `problems`, the first few of them in full; returns where the list is empty."""
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


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
    if recipe.parallel.dp_replicate == 1:
        tries = "parallel.dp_replicate=2, or local_sgd.sync_every=null"
        yield f"<local_sgd.sync_every>: needs replicas that train apart, and <parallel.dp_replicate>; try {tries}"
    if recipe.parallel.sharding in _INSIDE_A_REPLICA:
        words = (
            "sums gradients over parallel.dp_replicate in every step, which <local_sgd.sync_every> is there to avoid"
        )
        yield f"<parallel.sharding>: {words}; try {_INSIDE_A_REPLICA[recipe.parallel.sharding]}"
    at_the_end = ", or replicas meet but at the end"
    yield from at_most(recipe, "local_sgd.sync_every", "train.steps", max(1, steps // 10), because=at_the_end)
    for limit, because in {
        "model.layers": ", because fragments are made of blocks",
        "local_sgd.sync_every": ", because each has a step of its own",
    }.items():
        tries = str(min(recipe.model.layers, every))
        yield from at_most(recipe, "local_sgd.fragments", limit, tries, because=because)
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
    if data.tokenizer == "bytes" and vocab < _BYTE_TOKENIZER_IDS:
        tries = str(multiple_from(_BYTE_TOKENIZER_IDS, recipe.parallel.tp))
        yield f"<model.vocab>: must be at least {_BYTE_TOKENIZER_IDS}, the ids of <data.tokenizer>; try {tries}"
    if optimizer.stochastic_rounding and train.precision != "bf16_pure":
        words = "keeps its weights in float32, where there is nothing to round"
        yield f"<optimizer.stochastic_rounding>: <train.precision> {words}; try train.precision=bf16_pure"
    for token in data.ignore_token_ids:
        if not 0 <= token < vocab:
            tries = f"ids from 0 to {vocab - 1}"
            yield f"<data.ignore_token_ids>: {token} is no token of <model.vocab>; try {tries}"
    end = "train.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    last = optimizer.decay_steps or train.steps
    yield from at_most(recipe, "optimizer.warmup_steps", end, last // 10)
    yield from at_most(recipe, "logging.timeline", "train.steps", train.steps)
    yield from at_most(recipe, "train.sample_top_k", "model.vocab", "1, which is greedy")
    if data.source == "text" and not data.path:
        yield "<data.path>: <data.source> needs a file or a folder; try data.path=corpus.txt"
    if not recipe.checkpoint.resume:
        yield "checkpoint.resume = '': must be none, auto or the path of a checkpoint; try auto"
    if train.sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt = '': a sample continues some text; try train.sample_prompt='def '"
    if recipe.run_dir is not None and not recipe.run_dir.strip():
        yield "run_dir = '': must be a folder; try run_dir=runs/mine"


def warnings_for(recipe: Recipe) -> list[str]:
    """One line for each setting that is allowed and seldom meant."""
    return list(_warnings(recipe))


@rule
def _warnings(recipe: Recipe) -> Iterator[str]:
    train, optimizer, data = recipe.train, recipe.optimizer, recipe.data
    if optimizer.decay_steps is not None and optimizer.decay_steps < train.steps:
        lowest = f"{optimizer.lr * optimizer.min_lr_ratio:g}"
        words = "from there on the learning rate stays at its minimum"
        yield f"<optimizer.decay_steps>: shorter than <train.steps>; {words}, {lowest}"
    if train.precision != "fp16" and recipe.loss_scale != type(recipe.loss_scale)():
        yield "loss_scale: not used, because <train.precision> needs no scaling; try train.precision=fp16"
    if train.batch_warmup_steps is not None and train.batch_warmup_steps > train.steps:
        full = train.global_batch_size
        yield f"<train.batch_warmup_steps>: more than <train.steps>; the batch never has its full size of {full}"
    if data.source != "text" and data.path is not None:
        yield "<data.path>: not read, because <data.source>; try data.source=text"

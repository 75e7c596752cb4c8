"""The rules that a recipe must keep beyond the types of its values: the one registry that the trainer, the planner,
`shard()` and the layers read.

Each rule is a pure function that yields one line for each value that breaks it: the key, its value, the rule, and a
value that would do. `ranges` checks each number alone; the `rules_` files check what must fit together.
"""

from __future__ import annotations

from parallel3d.config.ranges import range_errors
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules_layout import (
    batch_errors,
    batch_warmup_errors,
    model_errors,
    parallel_errors,
    schedule_errors,
    sharding_errors,
    tokenizer_errors,
)
from parallel3d.config.rules_optimizer import optimizer_errors, step_in_backward_errors
from parallel3d.config.rules_run import local_sgd_errors, run_errors
from parallel3d.errors import ConfigError

_MOST_PROBLEMS = 5  # lines of an error; further problems are counted


def validate(recipe: Recipe) -> None:
    """Raises one `ConfigError` with a line for each rule that `recipe` breaks.

    The ranges come first, because what must divide what is only asked of numbers that are in range."""
    refuse([*range_errors(recipe)])
    refuse(
        [
            *model_errors(recipe),
            *tokenizer_errors(recipe),
            *parallel_errors(recipe),
            *sharding_errors(recipe.of_one_replica.parallel),
            *schedule_errors(recipe),
            *batch_errors(recipe),
            *batch_warmup_errors(recipe),
            *local_sgd_errors(recipe),
            *run_errors(recipe),
        ]
    )
    refuse([*optimizer_errors(recipe.optimizer), *step_in_backward_errors(recipe)])


def refuse(problems: list[str]) -> None:
    """Raises a `ConfigError` of all `problems`, the first few of them in full; returns where the list is empty."""
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


def warnings_for(recipe: Recipe) -> list[str]:
    """One line for each setting that is allowed and seldom meant."""
    train, optimizer, data = recipe.train, recipe.optimizer, recipe.data
    lines = []
    if optimizer.decay_steps is not None and optimizer.decay_steps < train.steps:
        lines.append(
            f"optimizer.decay_steps = {optimizer.decay_steps}: shorter than train.steps = {train.steps}; from there on "
            f"the learning rate stays at its minimum, {optimizer.lr * optimizer.min_lr_ratio:g}"
        )
    if train.precision != "fp16" and recipe.loss_scale != type(recipe.loss_scale)():
        lines.append(
            f"loss_scale: not used, because train.precision = {train.precision} needs no scaling; "
            "try train.precision=fp16"
        )
    if train.batch_warmup_steps is not None and train.batch_warmup_steps > train.steps:
        lines.append(
            f"train.batch_warmup_steps = {train.batch_warmup_steps}: more than train.steps = {train.steps}; the batch "
            f"never has its full size of {train.global_batch_size}"
        )
    if data.source != "text" and data.path is not None:
        lines.append(f"data.path = {data.path}: not read, because data.source = {data.source}; try data.source=text")
    return lines

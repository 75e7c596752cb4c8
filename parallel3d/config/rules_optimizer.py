"""The rules of a recipe's `optimizer` section: the keys that each optimizer reads, their values, and which layouts can
step in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from parallel3d.config.recipe import OPTIMIZER_KEYS, ParallelConfig, Recipe
from parallel3d.config.rules_layout import rule
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.config.yaml_text import shown
from parallel3d.schedules.registry import SCHEDULES

_MOST_NS_STEPS = 99  # the limit of torch.optim.Muon
# A step moves a running mean by 1 - beta of its distance from the new value, and bf16 rounds away a change below 1/512.
_LARGEST_BF16_BETA = 0.99


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
        words = (
            f"must be with <optimizer.state_dtype> at most {_LARGEST_BF16_BETA}, or what a step adds is rounded away"
        )
        if "betas" in OPTIMIZER_KEYS[config.name] and max(config.betas) > _LARGEST_BF16_BETA:
            yield f"<optimizer.betas>: {words}; try [0.9, 0.95]"
        if config.momentum is not None and config.momentum > _LARGEST_BF16_BETA:
            yield f"<optimizer.momentum>: {words}; try 0.95"


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
        yield (
            f"parallel.sharding = {parallel.strategy} is torch's fully_shard, which holds all reduced gradients until "
            "its backward ends, so that nothing is saved; try parallel.sharding=SHARD_OPTIMIZER"
        )
    if (microbatches := share // parallel.microbatch_size) > 1:
        yield (
            f"the gradients of {microbatches} microbatches are added up, so all of them are there until the last, and "
            f"nothing is saved; try parallel.microbatch_size={share}"
        )
    if tied_embeddings and parallel.pp > 1:
        words = "sums a gradient over the first and the last stage when both are done"
        yield f"model.tied_embeddings = true with <parallel.pp> {words}; try parallel.pp=1"
    if schedule.splits_backward:
        tries = f"parallel.schedule={schedule.whole_backward}"
        yield f"<parallel.schedule> puts off the gradients of weights beyond the backward; try {tries}"

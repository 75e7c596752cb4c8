"""The rules of a recipe's `optimizer` section: the keys that each optimizer reads, their values, and which layouts can
step in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from parallel3d.config.recipe import OptimizerConfig, ParallelConfig, Recipe
from parallel3d.config.sharding_strategies import HYBRID_OF
from parallel3d.schedules.registry import SCHEDULES

# The keys that not all optimizers read -> the optimizers that read them.
_USED_BY: dict[str, tuple[str, ...]] = {
    "betas": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "muon_lr": ("muon",),
    "lr_adjust": ("muon",),
    "ns_steps": ("muon",),
    "ns_dtype": ("muon",),
    "beta2_decay": ("adafactor",),
    "update_clip": ("adafactor",),
    "state_dtype": ("adamw", "sgd", "muon"),
}
_MOST_NS_STEPS = 99  # the limit of torch.optim.Muon
_LARGEST_BF16_BETA = 0.99
_STEP_IN_BACKWARD = "optimizer.step_in_backward = true"


def optimizer_errors(config: OptimizerConfig) -> Iterator[str]:
    """One line for each rule that the section breaks; its numbers are in range."""
    for key in fields(config):
        value = getattr(config, key.name)
        used_by = _USED_BY.get(key.name, (config.name,))
        if config.name not in used_by and value != key.default:
            yield (
                f"optimizer.{key.name} = {_shown(value)}: optimizer.name = {config.name} has no use for it; try "
                f"optimizer.{key.name}={_shown(key.default)}, or optimizer.name={' or '.join(used_by)}"
            )
    if config.name == "sgd" and config.momentum == 0 and config.nesterov:
        yield "optimizer.nesterov = true: needs momentum, and optimizer.momentum = 0; try optimizer.momentum=0.9"
    if config.name == "sgd" and config.momentum == 0 and config.state_dtype is not None:
        yield (
            f"optimizer.state_dtype = {config.state_dtype}: sgd without momentum has no states; "
            "try optimizer.state_dtype=null, or optimizer.momentum=0.9"
        )
    if config.ns_steps is not None and config.ns_steps > _MOST_NS_STEPS:
        yield f"optimizer.ns_steps = {config.ns_steps}: must be at most {_MOST_NS_STEPS}; try 5"
    if config.state_dtype == "bf16":
        yield from _bf16_errors(config)


def step_in_backward_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting with which parameters cannot be stepped in the backward, or nothing is saved by it."""
    if not recipe.optimizer.step_in_backward:
        return
    train, name, this = recipe.train, recipe.optimizer.name, _STEP_IN_BACKWARD
    if train.grad_clip is not None:
        yield (
            f"{this}: train.grad_clip = {train.grad_clip:g} needs the norm of the whole gradient before the first "
            "parameter is stepped; try train.grad_clip=null"
        )
    if train.precision == "fp16":
        yield (
            f"{this}: train.precision = fp16 skips a step in which any gradient overflows, which is known when all are "
            "there; try train.precision=bf16"
        )
    if name not in ("adamw", "sgd"):
        yield (
            f"{this}: optimizer.name = {name} exchanges something of many parameters at once in its step, and each "
            "would come alone; try optimizer.name=adamw"
        )
    layout = recipe.of_one_replica
    yield from _layout_errors(layout.parallel, layout.train.global_batch_size, recipe.model.tied_embeddings)


def can_step_in_backward(parallel: ParallelConfig, global_batch_size: int, *, tied_embeddings: bool) -> bool:
    """True if optimizer.step_in_backward works, and saves memory, in this layout."""
    return next(_layout_errors(parallel, global_batch_size, tied_embeddings), None) is None


def _layout_errors(parallel: ParallelConfig, global_batch_size: int, tied_embeddings: bool) -> Iterator[str]:
    """One line for each part of a layout that keeps parameters from being stepped in the backward."""
    this, share = _STEP_IN_BACKWARD, global_batch_size // parallel.dp
    microbatches = share // parallel.microbatch_size
    if parallel.strategy in HYBRID_OF.values() and parallel.dp_replicate > 1:
        yield (
            f"{this}: parallel.sharding = {parallel.strategy} is torch's fully_shard, which holds all reduced "
            "gradients until its backward ends, so that nothing is saved; try parallel.sharding=SHARD_OPTIMIZER"
        )
    if microbatches > 1:
        yield (
            f"{this}: the gradients of {microbatches} microbatches are added up, so all of them are there until "
            f"the last, and nothing is saved; try parallel.microbatch_size={share}"
        )
    if tied_embeddings and parallel.pp > 1:
        yield (
            f"{this}: model.tied_embeddings = true with parallel.pp = {parallel.pp} sums a gradient over the first and "
            "the last stage when both are done; try parallel.pp=1"
        )
    schedule = SCHEDULES[parallel.schedule]
    if schedule.splits_backward:
        yield (
            f"{this}: parallel.schedule = {schedule.name} puts off the gradients of weights beyond the backward; "
            f"try parallel.schedule={schedule.whole_backward}"
        )


def _bf16_errors(config: OptimizerConfig) -> Iterator[str]:
    """One line for each decay that is too slow for bf16. A step moves a running mean by 1 - beta of its distance from
    the new value, and bf16 rounds away a change below 1/512 of the mean."""
    rule = f"with optimizer.state_dtype = bf16 at most {_LARGEST_BF16_BETA}, or what a step adds is rounded away"
    if config.name in _USED_BY["betas"] and max(config.betas) > _LARGEST_BF16_BETA:
        yield f"optimizer.betas = {list(config.betas)}: must be {rule}; try [0.9, 0.95]"
    if config.momentum is not None and config.momentum > _LARGEST_BF16_BETA:
        yield f"optimizer.momentum = {config.momentum}: must be {rule}; try 0.95"


def _shown(value: object) -> str:
    """The value as a recipe spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value)

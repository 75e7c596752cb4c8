"""The rules of a recipe's `optimizer` section: what each optimizer has a use for, and which values it may have. No
torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from parallel3d.config.strategy import HYBRID_OF
from parallel3d.schedules.registry import SCHEDULES

if TYPE_CHECKING:
    from parallel3d.config.recipe import OptimizerConfig, Recipe

# The keys that not all optimizers have a use for -> those that have.
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
_MOST_NS_STEPS = 99  # as in torch.optim.Muon
_LARGEST_BF16_BETA = 0.99


def optimizer_faults(config: OptimizerConfig) -> Iterator[str]:
    """A line for each rule that the section breaks, its numbers being in range as numbers go."""
    for key in fields(config):
        value = getattr(config, key.name)
        used_by = _USED_BY.get(key.name, (config.name,))
        if config.name not in used_by and value != key.default:
            yield (
                f"optimizer.{key.name} = {_shown(value)}: optimizer.name = {config.name} has no use for it; try "
                f"optimizer.{key.name}={_shown(key.default)}, or optimizer.name={' or '.join(used_by)}"
            )
    yield from _values(config)


def step_in_backward_faults(recipe: Recipe) -> Iterator[str]:
    """What cannot be stepped before the whole gradient is known, or would save nothing by it."""
    if not recipe.optimizer.step_in_backward:
        return
    model, parallel = recipe.model, recipe.of_one_replica.parallel
    train, name = recipe.train, recipe.optimizer.name
    this = "optimizer.step_in_backward = true"
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
    if parallel.strategy in HYBRID_OF.values() and parallel.dp_replicate > 1:
        yield (
            f"{this}: parallel.sharding = {parallel.strategy} is torch's fully_shard, which holds all reduced "
            "gradients until its backward ends, so that nothing is saved; try parallel.sharding=SHARD_OPTIMIZER"
        )
    if recipe.microbatches > 1:
        share = train.global_batch_size // recipe.parallel.dp
        yield (
            f"{this}: the gradients of {recipe.microbatches} microbatches are added up, so all of them are there until "
            f"the last, and nothing is saved; try parallel.microbatch_size={share}"
        )
    if model.tied_embeddings and parallel.pp > 1:
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


def _values(config: OptimizerConfig) -> Iterator[str]:
    if config.momentum is not None and not 0 <= config.momentum < 1:
        yield f"optimizer.momentum = {config.momentum}: must be at least 0 and below 1; try 0.9"
    if config.name == "sgd" and config.momentum == 0 and config.nesterov:
        yield "optimizer.nesterov = true: needs momentum, and optimizer.momentum = 0; try optimizer.momentum=0.9"
    if config.name == "sgd" and config.momentum == 0 and config.state_dtype is not None:
        yield (
            f"optimizer.state_dtype = {config.state_dtype}: sgd without momentum has no states; "
            "try optimizer.state_dtype=null, or optimizer.momentum=0.9"
        )
    if config.muon_lr is not None and not config.muon_lr > 0:
        yield f"optimizer.muon_lr = {config.muon_lr}: must be above 0; try 0.02"
    if config.ns_steps is not None and config.ns_steps > _MOST_NS_STEPS:
        yield f"optimizer.ns_steps = {config.ns_steps}: must be at most {_MOST_NS_STEPS}; try 5"
    if config.beta2_decay is not None and not -1 <= config.beta2_decay < 0:
        yield f"optimizer.beta2_decay = {config.beta2_decay}: must be at least -1 and below 0; try -0.8"
    if config.update_clip is not None and not config.update_clip >= 1:
        yield f"optimizer.update_clip = {config.update_clip}: must be at least 1; try 1.0"
    if config.state_dtype == "bf16":
        yield from _bf16_faults(config)


def _bf16_faults(config: OptimizerConfig) -> Iterator[str]:
    """A step moves a running mean by 1 - beta of what it lacks, and bf16 rounds away what is below 1/512 of it."""
    rule = f"with optimizer.state_dtype = bf16 at most {_LARGEST_BF16_BETA}, or what a step adds is rounded away"
    if config.name in _USED_BY["betas"] and max(config.betas) > _LARGEST_BF16_BETA:
        yield f"optimizer.betas = {list(config.betas)}: must be {rule}; try [0.9, 0.95]"
    if config.momentum is not None and config.momentum > _LARGEST_BF16_BETA:
        yield f"optimizer.momentum = {config.momentum}: must be {rule}; try 0.95"


def _shown(value: object) -> str:
    """As a recipe has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value)

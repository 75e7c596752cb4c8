"""The rules of a recipe's `optimizer` section: what each optimizer has a use for, and which values it may have. No
torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.config import OptimizerConfig

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

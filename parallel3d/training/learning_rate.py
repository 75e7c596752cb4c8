"""The learning rate of each step."""

from __future__ import annotations

import math

import torch

from parallel3d.config.recipe import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step 1, 2, ...: linear to the peak at `warmup_steps`, then a cosine down to `min_lr_ratio` of it at
    `decay_steps` (default: `steps`, those of the run), then flat."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    last = steps if config.decay_steps is None else config.decay_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """A group with `lr_ratio` has that many times the rate (Muon's matrices, where they have a rate of their own)."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)

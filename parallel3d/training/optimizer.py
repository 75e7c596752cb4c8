"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parallel3d.config import OptimizerConfig
from parallel3d.training.gradients import LocalParameter


def build_optimizer(parameters: Sequence[LocalParameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over this rank's parts; weight decay on matrices alone."""
    matrices = [p.local for p in parameters if len(p.own.spec.shape) > 1]
    vectors = [p.local for p in parameters if len(p.own.spec.shape) <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


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
    for group in optimizer.param_groups:
        group["lr"] = rate

"""The learning rate of a step."""

from __future__ import annotations

import math

from parallel3d.config.recipe import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Returns the rate of step 1, 2, ... of a run of `steps`: linear to the peak at `warmup_steps`,
    flat until the decay begins (at once, but for `wsd`), down to `min_lr_ratio` of the peak at
    `decay_steps` (default: `steps`), flat. The rate depends on the step alone, so a run that is
    resumed with other keys has the rates of those keys."""
    if config.schedule == "range_test":  # up to the peak by the same factor in each step
        return float(config.lr * config.min_lr_ratio ** (1.0 - (step - 1) / max(1, steps - 1)))
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = config.warmup_steps if config.decay_start is None else config.decay_start
    last = steps if config.decay_steps is None else config.decay_steps
    progress = min(1.0, max(0, step - first) / max(1, last - first))
    share = 1.0 - progress
    if "cosine" in (config.schedule, config.decay_shape):
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif config.decay_shape == "sqrt":  # Haegele et al. 2024, arXiv 2405.18392
        share = 1.0 - math.sqrt(progress)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)

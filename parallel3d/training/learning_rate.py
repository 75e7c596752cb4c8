"""Learning-rate schedules."""

from __future__ import annotations

import math

from parallel3d.config.recipe import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Returns the learning rate of a step.

    The rate rises linearly to `lr` at `warmup_steps`, and with `constant` stays there. The other
    schedules decay to `min_lr_ratio * lr` at `decay_steps`, right after the warmup or, with `wsd`,
    after `decay_start`. `range_test` instead rises exponentially, from `min_lr_ratio * lr` in step
    1 to `lr` in step `steps`. The rate depends only on the recipe and the step, so a resumed run
    follows the recipe that it is resumed with.

    Args:
        config: Section `optimizer` of the recipe.
        step: Step number, from 1.
        steps: Number of steps in the run, the default of `decay_steps`.
    """
    if config.schedule == "range_test":
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

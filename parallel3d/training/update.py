"""How a step changes the parameters: the learning rate, the sums and the norm of gradients, and the
optimizer's step. Everything here works on plain tensors, this rank's part of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import OptimizerConfig
from parallel3d.diagnosis.replicas import Copies, tensors_of
from parallel3d.errors import ConfigError
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import ONE_RANK, Axis, Role
from parallel3d.optimizers.build import LocalOptimizer
from parallel3d.parallelize import Parallelized
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import foreach_copy_, group_of, norms, scale_

Observe = Callable[[LocalParameter], None]


class Update:
    """Completes the gradients and steps the optimizer. In each step the trainer calls `begin`,
    `complete`, `squared_norm` and, unless the step is skipped, `apply`."""

    def __init__(
        self, parts: Parallelized, optimizer: LocalOptimizer, axes: Mapping[str, Axis]
    ) -> None:
        self._parameters = parts.trained
        self._optimizer = optimizer
        self._axes = axes
        self._device = parts.pipeline.links.device
        self._tp = axes[Role.SPLIT_TENSORS]
        self._partial = [p for p in parts.trained if p.spec.partial_gradient and self._tp.size > 1]
        # the pipeline ranks that hold the first and the last stage
        placement = parts.pipeline.schedule.placement
        layers = axes[Role.SPLIT_LAYERS]
        ends = placement[0], placement[-1]
        self._ends = ONE_RANK  # or both ends of this pipeline, on these, if they share weights
        if parts.tied_ends and ends[0] != ends[1] and layers.rank in ends:
            ranks = dist.get_process_group_ranks(layers.group)
            name = f"{parts.pipeline.links.name} ends"
            members = [ranks[end] for end in ends]
            group = group_of(members, "pipeline_ends", name=name)
            self._ends = Axis(2, ends.index(layers.rank), group)
        # The weights are in the same order on both ends. A rank may have both ends of a weight.
        named = [[p for p in parts.trained if p.name == name] for name in parts.tied_ends]
        self._tied = [held[0] for held in named if held and self._ends.size == 2]
        self._pairs = [held for held in named if len(held) == 2]

    def begin(self, rate: float) -> None:
        """Sets the learning rate."""
        for group in self._optimizer.param_groups:
            # Muon's matrices may have a rate of their own
            group["lr"] = rate * group.get("lr_ratio", 1.0)

    def complete(self, observe: Observe | None = None) -> None:
        """Sums what the backward pass left partial, after gradients are summed over the data ranks:
        one all-reduce over tp of the norms' weights (with sequence parallelism), and one of each
        tied weight between the first and the last pipeline rank. `observe` is called with each
        parameter when its gradient is complete."""
        for parameter in self._parameters:
            parameter.part.sync_views()
        if self._partial:
            gradients = [_gradient(parameter).view(-1) for parameter in self._partial]
            summed = all_reduce(torch.cat(gradients), self._tp)
            sizes = [len(gradient) for gradient in gradients]
            foreach_copy_(gradients, summed.split(sizes))
        for parameter in self._tied:
            dist.all_reduce(_gradient(parameter), group=self._ends.group)
        for first, second in self._pairs:
            _gradient(second).copy_(_gradient(first).add_(_gradient(second)))
        if observe is not None:
            for parameter in self._parameters:
                observe(parameter)

    def squared_norm(self) -> Tensor:
        """Returns this rank's share of the squared norm of the gradient, a float64 scalar. The sum
        of the shares over all ranks of the mesh is the squared norm, each parameter counted
        once."""
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self._parameters:
            if not parameter.is_copy:
                copies = parameter.copies(self._axes)
                by_copies.setdefault(copies, []).append(_gradient(parameter))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for copies, gradients in by_copies.items():
            # The norms are float32 at least, because torch's own total norm of bf16 gradients would
            # be rounded to bf16.
            each = norms(gradients, torch.promote_types(gradients[0].dtype, torch.float32))
            total = total + torch.linalg.vector_norm(torch.stack(each)).double().square() / copies
        return total

    def apply(self, factor: float) -> None:
        """Steps with the gradients times `factor`."""
        if factor != 1.0 and self._parameters:  # the one time that gradients are multiplied
            scale_([_gradient(parameter) for parameter in self._parameters], factor)
        self._optimizer.step()

    def copies(self) -> list[Copies]:
        """Returns the tied weights and their optimizer states, which both ends of this pipeline
        hold."""
        tied = tensors_of(self._tied, self._optimizer.state)
        return [Copies(self._ends, tied)] if tied else []


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


def _gradient(parameter: LocalParameter) -> Tensor:
    gradient = parameter.local.grad
    if gradient is None:
        raise ConfigError(
            f"{parameter.name}: no forward pass of this step used it; remove it, or freeze it by "
            "requires_grad_(False)"
        )
    return gradient

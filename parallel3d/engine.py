"""Phases of a training step on one rank, shared by the trainer and `ParallelModel`.

After the backward passes of a step, gradients are reduced over the DP ranks. Partial gradients are
then summed over tp, and those of tied weights between the first and last stage. The optimizer
updates this rank's part of each parameter, a plain tensor. Finally, `publish` copies or all-gathers
the updated values into the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.diagnosis.replicas import Copies, States, tensors_of
from parallel3d.errors import ConfigError
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import ONE_RANK, Axis, Role
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.sharding.optimizer_parts import LocalParameter, ShardedData
from parallel3d.torch_private import foreach_copy_, group_of, norms, scale_
from parallel3d.watch.step_clock import timed

Observe = Callable[[LocalParameter], None]


class Engine:
    """Pipeline, data parallelism and parameters of this rank.

    Args:
        pipeline: Pipeline runtime of this rank's stages.
        data: Data-parallel handle of each stage.
        parameters: Parameters of this rank, including frozen ones.
        axes: Mesh axes by name.
        tied_ends: Names of the parameters that the first and last stage share.
        parameter_count: Number of parameters of the full model.
    """

    def __init__(
        self,
        pipeline: PipelineRuntime,
        data: Sequence[ShardedData],
        parameters: Sequence[LocalParameter],
        axes: Mapping[str, Axis],
        tied_ends: Sequence[str] = (),
        *,
        parameter_count: int = 0,
    ) -> None:
        self.pipeline = pipeline
        self.data = data
        self.parameters = parameters
        self.trained = [parameter for parameter in parameters if parameter.local.requires_grad]
        self.axes = axes
        self.parameter_count = parameter_count
        self._tp = axes[Role.SPLIT_TENSORS]
        self._partial = [p for p in self.trained if p.spec.partial_gradient and self._tp.size > 1]
        placement = pipeline.schedule.placement
        layers = axes[Role.SPLIT_LAYERS]
        ends = placement[0], placement[-1]  # Pipeline ranks of the first and last stage.
        # Axis over both ranks. ONE_RANK if they are equal, share no weights or exclude this rank.
        self._ends = ONE_RANK
        if tied_ends and ends[0] != ends[1] and layers.rank in ends:
            ranks = dist.get_process_group_ranks(layers.group)
            members = [ranks[end] for end in ends]
            group = group_of(members, "pipeline_ends", name=f"{pipeline.links.name} ends")
            self._ends = Axis(2, ends.index(layers.rank), group, layers.cause)
        # Both ends must have the same order. If one rank has both stages, it holds both copies.
        named = [[p for p in self.trained if p.name == name] for name in tied_ends]
        self._tied = [held[0] for held in named if held and self._ends.size == 2]
        self._pairs = [held for held in named if len(held) == 2]

    def finish_gradients(self, observe: Observe | None = None) -> None:
        """Completes the gradients after the last backward pass of a step.

        Reduces gradients over the DP ranks. Then a single all-reduce sums partial gradients over
        tp, such as those of norms under sequence parallelism, and one all-reduce per tied weight
        sums its gradients in the first and last stage. Finally calls `observe` with each trainable
        parameter.
        """
        device = self.pipeline.links.device  # Offloaded gradients are on the CPU.
        for data in self.data:
            data.finish_gradients()
        for parameter in self.trained:
            parameter.part.sync_views()
        if self._partial:
            gradients = [gradient_of(parameter).view(-1) for parameter in self._partial]
            summed = all_reduce(torch.cat(gradients).to(device), self._tp)
            sizes = [len(gradient) for gradient in gradients]
            foreach_copy_(gradients, summed.split(sizes))
        for parameter in self._tied:
            gradient = gradient_of(parameter)
            shared = gradient.to(device)
            with timed(self._ends.cause):
                dist.all_reduce(shared, group=self._ends.group)
            gradient.copy_(shared)
        for first, second in self._pairs:
            gradient_of(second).copy_(gradient_of(first).add_(gradient_of(second)))
        if observe is not None:
            for parameter in self.trained:
                observe(parameter)

    def squared_norm_share(self) -> Tensor:
        """Returns this rank's share of the squared gradient norm, a float64 scalar.

        The sum over all ranks is the squared norm. A gradient with n copies counts 1 / n in each.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self.trained:
            if not parameter.is_copy:
                by_copies.setdefault(parameter.copies, []).append(gradient_of(parameter))
        total = torch.zeros((), dtype=torch.float64, device=self.pipeline.links.device)
        for copies, gradients in by_copies.items():
            # Compute at least in float32. For bf16 gradients torch would round the norm to bf16.
            each = norms(gradients, torch.promote_types(gradients[0].dtype, torch.float32))
            total = total + torch.linalg.vector_norm(torch.stack(each)).double().square() / copies
        return total

    def scale_gradients(self, factor: float) -> None:
        if factor != 1.0 and self.trained:
            scale_([gradient_of(parameter) for parameter in self.trained], factor)

    def publish(self) -> None:
        """Starts to copy or all-gather updated parameters into the modules."""
        for data in self.data:
            data.publish()

    def clear_gradients(self) -> None:
        for data in self.data:
            data.clear_gradients()

    def free_gathered(self) -> None:
        """Reshards parameters that a forward pass without a backward pass left unsharded."""
        for data in self.data:
            data.free_gathered()

    def copies(self, states: States) -> list[Copies]:
        """Returns the tied weights and their optimizer states, if both end ranks hold copies."""
        tied = tensors_of(self._tied, states)
        return [Copies(self._ends, tied)] if tied else []


def gradient_of(parameter: LocalParameter) -> Tensor:
    """Returns the gradient of this rank's part of a parameter. Raises ConfigError if it is None."""
    gradient = parameter.local.grad
    if gradient is None:
        raise ConfigError(
            f"{parameter.name}: no forward pass of this step used it; remove it, or freeze it with "
            "requires_grad_(False)"
        )
    return gradient

"""What a rank trains, and the order of a training step. The trainer and `parallel_model` share it.

After the backward passes of a step, gradients are summed over the data ranks, then over tp and
between the first and the last stage if they are partial there. The optimizer steps this rank's part
of each parameter. Then the modules get what all ranks have stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.errors import ConfigError
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis, Role
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.sharding.optimizer_parts import LocalParameter, ShardedData
from parallel3d.torch_private import foreach_copy_, group_of, norms

Observe = Callable[[LocalParameter], None]


class Engine:
    """The pipeline, the data dimension and the parameters of this rank. `tied_ends` are the names
    of the parameters that the first and the last stage share."""

    def __init__(
        self,
        pipeline: PipelineRuntime,
        data: Sequence[ShardedData],
        parameters: Sequence[LocalParameter],
        axes: Mapping[str, Axis],
        tied_ends: Sequence[str] = (),
    ) -> None:
        self.pipeline, self.data, self.axes = pipeline, data, axes
        self.parameters = parameters  # including frozen ones
        self.trained = [p for p in parameters if p.local.requires_grad]
        self._tp, layers = axes[Role.SPLIT_TENSORS], axes[Role.SPLIT_LAYERS]
        self._partial = [p for p in self.trained if p.spec.partial_gradient and self._tp.size > 1]
        placement = pipeline.schedule.placement
        ends = placement[0], placement[-1]
        # the process group of this pipeline's two end ranks, on these if they are two
        self.ends: dist.ProcessGroup | None = None
        if tied_ends and ends[0] != ends[1] and layers.rank in ends:
            assert layers.group is not None
            ranks = dist.get_process_group_ranks(layers.group)
            group = [ranks[end] for end in ends]
            self.ends = group_of(group, "pipeline_ends", name=f"{pipeline.links.name} ends")
        # The weights are in the same order on both ends. A rank may have both ends of a weight.
        named = [[p for p in self.trained if p.name == name] for name in tied_ends]
        self.tied = [held[0] for held in named if held and self.ends]
        self._pairs = [held for held in named if len(held) == 2]

    def finish_gradients(self, observe: Observe | None = None) -> None:
        """Completes the gradients after the last backward pass of a step. After the data ranks' sum
        come one all-reduce over tp of the norms' weights (with sequence parallelism), and one of
        each tied weight between the first and the last pipeline rank. `observe` is called with each
        parameter when its gradient is complete."""
        for data in self.data:
            data.finish_gradients()
        for parameter in self.parameters:
            parameter.sync_views()
        if self._partial:
            gradients = [gradient_of(p) for p in self._partial]
            summed = all_reduce(torch.cat([g.flatten() for g in gradients]), self._tp)
            parts = summed.split([g.numel() for g in gradients])
            shaped = [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
            foreach_copy_(gradients, shaped)
        for parameter in self.tied:
            dist.all_reduce(gradient_of(parameter), group=self.ends)
        for first, second in self._pairs:
            gradient_of(second).copy_(gradient_of(first).add_(gradient_of(second)))
        if observe is not None:
            for parameter in self.trained:
                observe(parameter)

    def squared_norm(self, parameters: Sequence[LocalParameter] | None = None) -> Tensor:
        """Returns this rank's share of the squared norm of the gradient of `parameters` (None:
        all), a float64 scalar. The sum of the shares over all ranks of the mesh is the squared
        norm, with each parameter counted once."""
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self.trained if parameters is None else parameters:
            if not parameter.is_copy:
                by_copies.setdefault(parameter.copies(self.axes), []).append(gradient_of(parameter))
        total = torch.zeros((), dtype=torch.float64, device=self.pipeline.links.device)
        for copies, gradients in by_copies.items():
            # The norms are float32 at least, because torch's own total norm of bf16 gradients would
            # be rounded to bf16.
            each = norms(gradients, torch.promote_types(gradients[0].dtype, torch.float32))
            total = total + torch.linalg.vector_norm(torch.stack(each)).double().square() / copies
        return total

    def publish(self) -> None:
        """Makes the modules compute with what is in `parameters` from now on."""
        for data in self.data:
            data.publish()

    def clear_gradients(self) -> None:
        for data in self.data:
            data.clear_gradients()

    def free_gathered(self) -> None:
        """Frees the gathered parameters that a forward pass without a backward pass leaves."""
        for data in self.data:
            data.free_gathered()


def gradient_of(parameter: LocalParameter) -> Tensor:
    """Returns the gradient of this rank's part. Raises ConfigError if it has none."""
    gradient = parameter.local.grad
    if gradient is None:
        raise ConfigError(
            f"{parameter.name}: no forward pass of this step used it; remove it, or freeze it by "
            "requires_grad_(False)"
        )
    return gradient

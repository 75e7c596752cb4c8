"""Interface of a sharded model to optimizers and training loops, common to all strategies.

It exposes this rank's part of each parameter as a plain tensor, and hooks for the phases of a
training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from parallel3d.layers.experts import ExpertWeights
from parallel3d.layers.parameter import ParameterSpec, named_specs
from parallel3d.layers.weight_gradients import like_parameter, local_tensor
from parallel3d.mesh import ONE_RANK, Axis, Role


class OptimizerPart:
    """This rank's part of a parameter.

    The optimizer updates `local`, a plain tensor with all rows of the parameter or only this
    rank's. If the parameter has a lower precision than the optimizer, `local` belongs to its master
    copy. `repeated_over` names the data-parallel axes along which this part is replicated.

    This base class is for parameters that stay in their module, either replicated or sharded by
    `fully_shard` over `shards`. `find` looks up the current parameter, because `fully_shard`
    replaces it while it is unsharded.
    """

    def __init__(
        self, find: Callable[[], Tensor], shards: Axis, repeated_over: frozenset[str]
    ) -> None:
        self._find = find
        self._shards = shards
        self.repeated_over = repeated_over
        self.local = nn.Parameter(local_tensor(find().detach()), requires_grad=find().requires_grad)

    def sync_views(self) -> None:
        """Updates `local` and `local.grad` to refer to the parameter and its gradient."""
        tensor = self._find()
        self.local.data = local_tensor(tensor.detach())
        self.local.grad = None if tensor.grad is None else local_tensor(tensor.grad)

    def distributed(self, local: Tensor) -> Tensor:
        """Returns `local` as a DTensor over the axes that split this part, if any."""
        return like_parameter(self._find(), local)

    @torch.no_grad()
    def initialize(self, draw: Callable[[Axis], Tensor]) -> None:
        """Fills this part with `draw(axis)`, this rank's rows of the tp shard split over `axis`."""
        local_tensor(self._find()).copy_(draw(self._shards))


class ShardedData:
    """Handle returned by `shard`. Its methods are called at fixed points of a training step.

    docs/reference/sharding.md has an example loop. This base class handles a single data-parallel
    rank without mixed precision. Subclasses implement the strategies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def allocate(self) -> None:
        """Allocates buffers. Call it after `to_empty` if the model was on the meta device."""

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        """Returns the part of `module.attribute` that the optimizer updates."""
        return OptimizerPart(partial(getattr, module, attribute), ONE_RANK, frozenset())

    def before_backward(self, last: bool) -> None:
        """Call it before each backward pass. `last` marks the last one of a step.

        With `reduce` = "step", gradients are reduced in the last one. Without a call, every
        backward pass counts as the last.
        """

    def after_weights(self, last: bool) -> None:
        """Call it after the weight-gradient half of each split backward pass. With `last`, which
        marks the last one of the step, it starts to reduce the gradients.
        """

    def finish_gradients(self) -> None:
        """Reduces gradients over the DP ranks. Call it after the last backward pass of a step."""

    def clear_gradients(self) -> None:
        """Clears all gradients. Call it in every step instead of `model.zero_grad()`."""
        self._model.zero_grad()

    def drop_gradients(self) -> None:
        """Reduces and discards the gradients of warm-up backward passes."""
        self.finish_gradients()
        self.clear_gradients()

    def publish(self) -> None:
        """Starts to update the model's parameters with the values that the optimizer wrote.

        Call it after the optimizer step. It all-gathers the values and casts master copies, and
        waits for that unless `publish_in_forward` is True.
        """

    def finish_publish(self) -> None:
        """Completes `publish`. Call it before reading parameters without a forward pass."""

    def free_gathered(self) -> None:
        """Reshards parameters that a forward pass without a backward pass left unsharded."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a stage on this rank.

    `name` is the name in the full model. A tied parameter has several names and is listed under the
    first.
    """

    name: str
    module: nn.Module
    spec: ParameterSpec
    is_copy: bool  # True on the last stage if the first stage also has the parameter.
    part: OptimizerPart
    axes: Mapping[str, Axis]  # Axes of its mesh by name. Experts have a mesh of their own.

    @property
    def local(self) -> nn.Parameter:
        """Plain tensor that the optimizer updates. Its gradient is `local.grad`."""
        return self.part.local

    @property
    def repeated_over(self) -> frozenset[str]:
        """Names of the axes that replicate this part."""
        if self.spec.dim is None:
            return self.part.repeated_over | {Role.SPLIT_TENSORS}
        return self.part.repeated_over

    @property
    def copies(self) -> int:
        """Number of ranks of this pipeline stage that hold the same part."""
        return math.prod(self.axes[name].size for name in self.repeated_over)


def local_parameters(
    module: nn.Module,
    aliases: dict[str, str],
    data: ShardedData,
    axes: Mapping[str, Axis],
    experts: Mapping[str, Axis] | None = None,
) -> list[LocalParameter]:
    """Returns the parameters of a stage, without duplicates.

    `aliases` maps later names of a shared parameter to its first name in the full model. `axes` are
    those of the mesh, and `experts` those of the experts' own mesh, if any.
    """
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    specs = dict(named_specs(module))
    found = []
    for name, parameter in module.named_parameters():
        spec = specs.get(name) or _spec_of(parameter)
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        first = aliases.get(name, name)
        part = data.part(owner, attribute)
        own_axes = experts or axes if isinstance(owner, ExpertWeights) else axes
        is_copy = first not in held
        found.append(
            LocalParameter(
                first,
                owner,
                spec,
                is_copy,
                part,
                own_axes,
            )
        )
    return found


def _spec_of(parameter: Tensor) -> ParameterSpec:
    """Returns the spec of a parameter that does not belong to a layer of this library."""
    dim = None
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name == Role.SPLIT_TENSORS and isinstance(placement, Shard):
                dim = placement.dim
    return ParameterSpec(tuple(parameter.shape), dim, init=lambda tensor, generator: None)

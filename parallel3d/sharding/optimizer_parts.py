"""What an optimizer and a training loop see of a sharded model, whatever the strategy: this rank's
part of each parameter as a plain tensor, and what happens to all parts at the turns of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from parallel3d.layers.gradients import like_parameter, local_tensor
from parallel3d.layers.parameter import ParameterSpec, named_specs
from parallel3d.mesh import ONE_RANK, Axis, Role


class OptimizerPart:
    """This rank's part of a parameter. The optimizer steps `local`: all rows or this rank's, of the
    parameter itself or of its master copy where the parameter is kept in fewer bits. A frozen
    parameter's `local` requires no gradient and gets none. `repeated_over` are the names of the
    data axes on whose ranks this part is the same.

    Here it is what the parameter's module itself holds between steps: sharded by `fully_shard` over
    `shards`, or whole. `find` looks the parameter up, because `fully_shard` puts another in its
    place and back."""

    def __init__(
        self, find: Callable[[], Tensor], shards: Axis, repeated_over: frozenset[str]
    ) -> None:
        self._find = find
        self._shards = shards
        self.repeated_over = repeated_over
        self.local = nn.Parameter(local_tensor(find().detach()), requires_grad=find().requires_grad)

    def sync_views(self) -> None:
        """Points `local` and `local.grad` at where they are after a backward."""
        tensor = self._find()
        self.local.data = local_tensor(tensor.detach())
        self.local.grad = None if tensor.grad is None else local_tensor(tensor.grad)

    def distributed(self, local: Tensor) -> Tensor:
        """Returns a tensor of `local`'s shape as the one that all ranks hold together: a DTensor
        over the axes that split this part, or itself if none does."""
        return like_parameter(self._find(), local)

    @torch.no_grad()
    def initialize(self, draw: Callable[[Axis], Tensor]) -> None:
        """Fills this part. `draw` returns the rows of one shard of an axis, of what this tp rank
        has in all."""
        local_tensor(self._find()).copy_(draw(self._shards))


class ShardedData:
    """What `shard` returns: what a training loop tells the data dimension. `docs/reference/sharding.md` has a
    loop. This class is one data rank in one precision, where nothing is cut and nothing is sent;
    the strategies derive from it."""

    _shards = ONE_RANK
    _repeated_over: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def allocate(self) -> None:
        """Is called after a model that was on the meta device has got memory (`to_empty`)."""

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        """Returns what the optimizer steps of the parameter that `module` holds as `attribute`."""
        find = partial(getattr, module, attribute)
        return OptimizerPart(find, self._shards, self._repeated_over)

    def before_backward(self, last: bool) -> None:
        """Is called before each backward and told whether it is the step's last; without a call
        every one is."""

    def after_weights(self, last: bool) -> None:
        """Is called after the second half of a split backward, which computes the weights'
        gradients."""

    def finish_gradients(self) -> None:
        """Is called after the last backward. Gradients are then summed over the data ranks."""

    def clear_gradients(self) -> None:
        self._model.zero_grad()

    def drop_gradients(self) -> None:
        """Is called after a warm-up's backwards: their gradients are summed over the data ranks and
        thrown away."""
        self.finish_gradients()
        self.clear_gradients()

    def publish(self) -> None:
        """Is called after the optimizer's step. The model then computes with the new values."""

    def finish_publish(self) -> None:
        """Is called before the module's own tensors are read without a forward
        (`publish_in_forward`)."""

    def free_gathered(self) -> None:
        """Frees the gathered parameters that a forward without a backward leaves behind."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a stage on this rank. `name` is global; if the model ties two names, both have
    the first."""

    name: str
    module: nn.Module
    spec: ParameterSpec
    is_copy: bool  # on the last stage, of a parameter that the first stage has as well
    part: OptimizerPart  # what the optimizer steps on this rank

    @property
    def local(self) -> nn.Parameter:
        """The plain tensor that the optimizer steps, with its gradient in `local.grad`."""
        return self.part.local

    @property
    def repeated_over(self) -> frozenset[str]:
        """The names of the axes on whose ranks this part is the same."""
        if self.spec.dim is None:
            return self.part.repeated_over | {Role.SPLIT_TENSORS}
        return self.part.repeated_over

    def copies(self, axes: Mapping[str, Axis]) -> int:
        """Returns how many ranks of this pipeline stage have the same part."""
        return math.prod(axes[name].size for name in self.repeated_over)


def local_parameters(
    module: nn.Module, aliases: dict[str, str], data: ShardedData
) -> list[LocalParameter]:
    """Returns the parameters of a stage, each once. `aliases` maps the later names of a shared
    parameter to its first name in the full model."""
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    specs = dict(named_specs(module))
    found = []
    for name, parameter in module.named_parameters():
        spec = specs.get(name) or _spec_of(parameter)
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        first = aliases.get(name, name)
        part = data.part(owner, attribute)
        found.append(LocalParameter(first, owner, spec, is_copy=first not in held, part=part))
    return found


def _spec_of(parameter: Tensor) -> ParameterSpec:
    """Returns the spec of a parameter of a module that is not a layer of this library."""
    dim = None
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name == Role.SPLIT_TENSORS and isinstance(placement, Shard):
                dim = placement.dim
    return ParameterSpec(tuple(parameter.shape), dim, init=lambda tensor, generator: None)

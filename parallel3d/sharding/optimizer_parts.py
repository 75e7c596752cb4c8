"""What an optimizer and a training loop see of a sharded model, whatever the strategy: this rank's part of each
parameter as a plain tensor, and what happens to all parts at the turns of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel3d.layers.parameter import ParallelModule, ParameterSpec, like_parameter, local_tensor
from parallel3d.mesh import Axis
from parallel3d.row_split import shard_rows


class OptimizerPart(Protocol):
    """This rank's part of a parameter. The optimizer steps `local`: all rows or this rank's, of the parameter itself or
    of its master copy where the parameter is kept in fewer bits."""

    @property
    def local(self) -> nn.Parameter: ...

    @property
    def repeated_over(self) -> frozenset[str]:
        """The names of the data axes on whose ranks this part is the same."""
        ...

    def sync_views(self) -> None:
        """Points `local` and `local.grad` at where they are after a backward."""
        ...

    def distributed(self, local: Tensor) -> Tensor:
        """Returns a tensor of `local`'s shape as the one that all ranks hold together: a DTensor over the axes that
        split this part, or itself if none does."""
        ...

    def when_complete(self, act: Callable[[], None]) -> None:
        """Lets each step's one backward call `act` as soon as `local.grad` is the sum over the data ranks, and drop the
        gradient afterwards. The gradient must go through autograd, because no hook hears of fused gradients
        (`layers.parameter`)."""
        ...

    def initialize(self, values: Tensor) -> None:
        """Takes this part out of the values of all data ranks together (of this tp rank)."""
        ...


class ShardedData(Protocol):
    """What `shard` returns: what a training loop tells the data dimension. `docs/sharding.md` has a loop."""

    def allocate(self) -> None:
        """Is called after a model that was on the meta device has got memory (`to_empty`)."""
        ...

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        """Returns what the optimizer steps of the parameter that `module` holds as `attribute`."""
        ...

    def before_backward(self, last: bool) -> None:
        """Is called before each backward of a step and told whether it is the last; without a call every backward
        is."""
        ...

    def after_weights(self, last: bool) -> None:
        """Is called after the second half of a split backward, which computes the weights' gradients."""
        ...

    def finish_gradients(self) -> None:
        """Is called after the last backward. Gradients are then summed over the data ranks."""
        ...

    def clear_gradients(self) -> None: ...

    def publish(self) -> None:
        """Is called after the optimizer's step. The model then computes with the new values."""
        ...

    def free_gathered(self) -> None:
        """Frees the gathered parameters that a forward without a backward leaves behind."""
        ...


@dataclass(frozen=True)
class ShardedPart:
    """The part of a parameter that its module itself holds between steps: sharded by `fully_shard`, or whole.

    `tensor` looks the parameter up, because `fully_shard` puts another in its place and back.
    """

    tensor: Callable[[], Tensor]
    local: nn.Parameter
    repeated_over: frozenset[str]
    rank: int
    ranks: int

    @classmethod
    def of(cls, tensor: Callable[[], Tensor], *, repeated_over: frozenset[str], rank: int, ranks: int) -> ShardedPart:
        return cls(tensor, nn.Parameter(local_tensor(tensor().detach())), repeated_over, rank, ranks)

    def sync_views(self) -> None:
        tensor = self.tensor()
        self.local.data = local_tensor(tensor.detach())
        self.local.grad = None if tensor.grad is None else local_tensor(tensor.grad)

    def distributed(self, local: Tensor) -> Tensor:
        return like_parameter(self.tensor(), local)

    def when_complete(self, act: Callable[[], None]) -> None:
        def take(tensor: Tensor) -> None:
            """Hands the gradient over. `fully_shard` calls it when it has cut the sum of a unit into its parameters."""
            assert tensor.grad is not None
            self.local.data, self.local.grad = local_tensor(tensor.detach()), local_tensor(tensor.grad)
            act()
            self.local.grad = tensor.grad = None

        self.tensor().register_post_accumulate_grad_hook(take)

    @torch.no_grad()
    def initialize(self, values: Tensor) -> None:
        local_tensor(self.tensor()).copy_(own_rows(values, self.rank, self.ranks))


def own_rows(values: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a view of the rows of `rank`, as DTensor's Shard(0) cuts them."""
    rows = shard_rows(values.shape[0], rank, ranks)
    return values[rows.start : rows.stop]


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a stage on this rank. `name` is global; if the model ties two names, both have the first."""

    name: str
    module: ParallelModule
    attribute: str
    spec: ParameterSpec
    is_copy: bool  # the second of a tied pair, on another stage than the first
    part: OptimizerPart  # what the optimizer steps on this rank

    @property
    def tensor(self) -> Tensor:
        """The parameter as it is now: `fully_shard` puts another in its place and back."""
        tensor = getattr(self.module, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def local(self) -> nn.Parameter:
        """The plain tensor that the optimizer steps, with its gradient in `local.grad`: the parameter, or its master
        copy if the parameter has fewer bits; this rank's rows, if it is split over dp_shard."""
        return self.part.local

    def sync_views(self) -> None:
        """Points `local` and its gradient at where the backward has put them."""
        self.part.sync_views()

    def distributed(self, local: Tensor) -> Tensor:
        """Returns `local`, of the shape of `self.local`, as the tensor that all ranks hold together: a DTensor over the
        axes that split this parameter's part, or itself if none does."""
        return self.part.distributed(local)

    def copies(self, axes: Mapping[str, Axis]) -> int:
        """Returns how many ranks of this pipeline stage have the same part."""
        over = self.part.repeated_over | ({"tp"} if self.spec.dim is None else set())
        return math.prod(axes[name].size for name in over)


def local_parameters(module: nn.Module, aliases: dict[str, str], data: ShardedData) -> list[LocalParameter]:
    """Returns the parameters of a stage; one that the stage uses twice is there once. `aliases` gives the later name of
    each parameter that the model uses twice its first name."""
    found: dict[int, LocalParameter] = {}
    for prefix, owner in module.named_modules():
        if not isinstance(owner, ParallelModule):
            continue
        for attribute, spec in owner.specs.items():
            name = f"{prefix}.{attribute}"
            tensor = getattr(owner, attribute)
            if id(tensor) not in found:
                first, part = aliases.get(name, name), data.part(owner, attribute)
                found[id(tensor)] = LocalParameter(first, owner, attribute, spec, is_copy=name in aliases, part=part)
    return list(found.values())

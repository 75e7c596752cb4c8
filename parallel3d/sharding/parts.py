"""What the optimizer sees of a parameter: this rank's part of it as a plain tensor, whatever the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel3d.layers.parameter import ParallelModule, ParameterSpec, like_parameter, local_tensor
from parallel3d.mesh import Axis


class OptimizerPart(Protocol):
    """This rank's part of a parameter. `local` is what the optimizer steps: of the parameter, or where that is kept in
    fewer bits of its master copy, all rows or this rank's."""

    @property
    def local(self) -> nn.Parameter: ...

    @property
    def repeated_over(self) -> frozenset[str]:
        """Names of the data axes on whose ranks this part is the same."""
        ...

    def sync_views(self) -> None:
        """Points `local` and `local.grad` at where they are after a backward."""
        ...

    def distributed(self, local: Tensor) -> Tensor:
        """A tensor of `local`'s shape as the one that all ranks hold together: a DTensor over the axes that split this
        part, or itself where none does."""
        ...

    def when_complete(self, act: Callable[[], None]) -> None:
        """Lets each step's one backward call `act` as soon as `local.grad` is the sum over the data ranks, and drop the
        gradient afterwards. It must have gone through autograd: with fused gradients (`layers.parameter`) no hook
        hears of it."""
        ...

    def initialize(self, whole: Tensor) -> None:
        """Takes its values from those of all data ranks together (of this tp rank)."""
        ...


def own_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A view of the rows of `rank`: ceil(rows / ranks) each, but for the last ones; as DTensor's Shard(0)."""
    rows = -(-whole.shape[0] // ranks)
    return whole[rank * rows : (rank + 1) * rows]


@dataclass(frozen=True)
class ShardedPart:
    """The part of a parameter that its module itself holds between steps: sharded by `fully_shard`, or whole.

    `tensor` looks the parameter up, because `fully_shard` puts others in its place and back.
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
            """Of `fully_shard` this is called when the sum of a unit has been cut into its parameters."""
            assert tensor.grad is not None
            self.local.data, self.local.grad = local_tensor(tensor.detach()), local_tensor(tensor.grad)
            act()
            self.local.grad = tensor.grad = None

        self.tensor().register_post_accumulate_grad_hook(take)

    @torch.no_grad()
    def initialize(self, whole: Tensor) -> None:
        local_tensor(self.tensor()).copy_(own_rows(whole, self.rank, self.ranks))


class ShardedData(Protocol):
    """What `shard` gives: what a training loop tells it and asks of it. `docs/sharding.md` has a loop."""

    def allocate(self) -> None:
        """After a model that was on the meta device has got memory (`to_empty`)."""
        ...

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        """What the optimizer steps of the parameter that `module` holds as `attribute`."""
        ...

    def before_backward(self, last: bool) -> None:
        """Before each backward of a step: whether it is its last. Without it, each is."""
        ...

    def after_weights(self, last: bool) -> None:
        """After the second half of a split backward."""
        ...

    def finish_gradients(self) -> None:
        """After the last backward: gradients are then summed over the data ranks."""
        ...

    def clear_gradients(self) -> None: ...

    def publish(self) -> None:
        """After the optimizer's step: the model then computes with what it has made."""
        ...

    def free_gathered(self) -> None:
        """After a forward that no backward follows."""
        ...


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a stage on this rank. `name` is global; where the model ties two names, both have the first."""

    name: str
    module: ParallelModule
    attribute: str
    spec: ParameterSpec
    is_copy: bool  # the second of a tied pair, on another stage than the first
    part: OptimizerPart  # what the optimizer steps of it on this rank

    @property
    def tensor(self) -> Tensor:
        """The parameter as it is now: `fully_shard` puts others in its place and back."""
        tensor = getattr(self.module, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def local(self) -> nn.Parameter:
        """What the optimizer steps, a plain tensor: the parameter, or where it computes in fewer bits its master copy;
        of what is split over dp_shard this rank's rows. `local.grad` is its gradient."""
        return self.part.local

    def sync_views(self) -> None:
        """Points `local` and its gradient at where the backward has put them."""
        self.part.sync_views()

    def distributed(self, local: Tensor) -> Tensor:
        """`local`, of the shape of `self.local`, as the tensor that all ranks hold together: a DTensor over the axes
        that split this parameter's part, or itself where none does."""
        return self.part.distributed(local)

    def copies(self, axes: Mapping[str, Axis]) -> int:
        """Ranks of this pipeline stage that have the same part."""
        over = self.part.repeated_over | ({"tp"} if self.spec.dim is None else set())
        return math.prod(axes[name].size for name in over)


def local_parameters(module: nn.Module, aliases: dict[str, str], data: ShardedData) -> list[LocalParameter]:
    """The parameters of a stage, a tied one that it has twice once."""
    owned: dict[int, LocalParameter] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, ParallelModule):
            continue
        for attribute, spec in part.specs.items():
            name = f"{prefix}.{attribute}"
            tensor = getattr(part, attribute)
            if id(tensor) not in owned:
                first, local = aliases.get(name, name), data.part(part, attribute)
                owned[id(tensor)] = LocalParameter(first, part, attribute, spec, is_copy=name in aliases, part=local)
    return list(owned.values())

"""What the optimizer sees of a parameter: this rank's part of it as a plain tensor, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel3d.layers.parameter import like_parameter, local_tensor


class Part(Protocol):
    """This rank's part of a parameter. `local` is what the optimizer steps: of the parameter, or where that is kept in
    fewer bits of its master copy, all rows or this rank's."""

    @property
    def local(self) -> nn.Parameter: ...

    @property
    def repeated_over(self) -> frozenset[str]:
        """Names of the data axes on whose ranks this part is the same."""
        ...

    def refresh(self) -> None:
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

    def fill(self, whole: Tensor) -> None:
        """Takes its values from those of all data ranks together (of this tp rank)."""
        ...


def own_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A view of the rows of `rank`: ceil(rows / ranks) each, but for the last ones; as DTensor's Shard(0)."""
    rows = -(-whole.shape[0] // ranks)
    return whole[rank * rows : (rank + 1) * rows]


@dataclass(frozen=True)
class AtRest:
    """The part of a parameter that its module itself holds between steps: sharded by `fully_shard`, or whole.

    `tensor` looks the parameter up, because `fully_shard` puts others in its place and back.
    """

    tensor: Callable[[], Tensor]
    local: nn.Parameter
    repeated_over: frozenset[str]
    rank: int
    ranks: int

    @classmethod
    def of(cls, tensor: Callable[[], Tensor], *, repeated_over: frozenset[str], rank: int, ranks: int) -> AtRest:
        return cls(tensor, nn.Parameter(local_tensor(tensor().detach())), repeated_over, rank, ranks)

    def refresh(self) -> None:
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
    def fill(self, whole: Tensor) -> None:
        local_tensor(self.tensor()).copy_(own_rows(whole, self.rank, self.ranks))

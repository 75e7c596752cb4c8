"""Load of the experts of a mixture: how many tokens each of them computes in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.layers.collectives import all_reduce, all_reduce_over
from parallel3d.layers.router import Router
from parallel3d.mesh import Axis, Role


class ExpertLoad(NamedTuple):
    """Distribution of a step's tokens over the experts, in the worst layer.

    Args:
        fullest_expert: Tokens of the expert with the most, relative to the mean.
        fullest_rank: Tokens of the expert-parallel rank with the most, relative to the mean.
        idle_experts: Share of the experts without a token.
    """

    fullest_expert: float
    fullest_rank: float
    idle_experts: float


class ExpertLoads:
    """The routers of this rank's stages, and the loads of their experts over all ranks.

    Args:
        stages: Modules of the stages.
        axes: Axes of the mesh by name.
        ranks: Number of expert-parallel ranks.
    """

    def __init__(self, stages: Iterable[nn.Module], axes: Mapping[str, Axis], ranks: int) -> None:
        self.routers: dict[str, Router] = {}
        for stage in stages:
            for name, part in stage.named_modules():
                if isinstance(part, Router):
                    self.routers[name] = part
        self._axes = axes
        self._ranks = ranks
        self.loads: dict[str, Tensor] = {}  # Load of each router in the last step.

    def collect(self, device: torch.device) -> ExpertLoad:
        """Sums the loads of the step over the mesh. Collective.

        Call it after the last backward pass of a step.
        """
        layers = self._axes[Role.SPLIT_LAYERS]
        within = {name: axis for name, axis in self._axes.items() if name != Role.SPLIT_LAYERS}
        worst = torch.zeros(3, dtype=torch.float64, device=device)
        if self.routers:
            own = torch.stack([router.take_load().to(device) for router in self.routers.values()])
            loads = all_reduce_over(within, own)
            self.loads = dict(zip(self.routers, loads, strict=True))
            by_rank = loads.unflatten(1, (self._ranks, -1)).sum(2)
            shares = [
                each.double() / each.double().mean(1, keepdim=True) for each in (loads, by_rank)
            ]
            idle = (loads == 0).double().mean(1)
            worst = torch.stack([shares[0].amax(), shares[1].amax(), idle.amax()])
        return ExpertLoad(
            *all_reduce(
                worst,
                layers,
                "max",
            ).tolist()
        )

    def balance(self) -> None:
        """Moves the biases of the routers by the loads of the step."""
        for name, router in self.routers.items():
            router.balance(self.loads[name])

    @property
    def biases(self) -> dict[str, Tensor]:
        """Biases of the routers by their names in a checkpoint. They share memory."""
        found = {f"{name}.bias": router.bias for name, router in self.routers.items()}
        return {name: bias for name, bias in found.items() if bias is not None}

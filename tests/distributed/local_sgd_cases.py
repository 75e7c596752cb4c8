"""DiLoCo in plain torch in one process, the referee of tests of local SGD: one plain model and one
AdamW a replica.

Written after the papers (arXiv 2311.08105, algorithm 1; 2501.18512, algorithm 2), step by step and
tensor by tensor, with nothing of the project's own outer loop.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.data.loader import Batch
from parallel3d.tools.bench.plain_torch.llama import PlainStack, token_loss
from tests.distributed.training_cases import make_loader, plain_stack


class PlainDiloco:
    """`recipe.parallel.dp_replicate` models that train apart on their shares of the global
    batch."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.local = recipe, recipe.local_sgd
        self.replicas = [plain_stack(recipe) for _ in range(recipe.parallel.dp_replicate)]
        self.outer = {
            name: p.detach().clone() for name, p in self.replicas[0].model.named_parameters()
        }
        self.velocity = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.sent: dict[tuple[int, str], Tensor] = {}  # (step, name) -> mean pseudo-gradient
        self.step = 0

    def train_step(self) -> tuple[float, float]:
        """Trains a step. Returns the mean of the replicas' losses, and the root of the mean of
        their squared norms."""
        share = replace(self.recipe, parallel=ParallelConfig(dp_replicate=len(self.replicas)))
        results = []
        for index, replica in enumerate(self.replicas):
            results.append(replica.train_step(make_loader(share, index).batch(self.step)))
        self.step += 1
        self._synchronise()
        losses, norms = zip(*results, strict=True)
        return sum(losses) / len(losses), (sum(norm**2 for norm in norms) / len(norms)) ** 0.5

    def outer_loss(self, batch: Batch) -> float:
        """Returns the loss of the outer parameters."""
        model = PlainStack(self.recipe, self.outer).model
        with torch.no_grad():
            return sum(
                token_loss(model(x), y).item()
                for x, y in zip(batch.inputs, batch.labels, strict=True)
            ) / len(batch.inputs)

    @torch.no_grad()
    def _synchronise(self) -> None:
        every, parts, tau = self.local.sync_every, self.local.fragments, self.local.overlap_steps
        assert every is not None
        for name in self.outer:
            own = [replica.model.get_parameter(name) for replica in self.replicas]
            # the first step that it is synchronised after
            turn = (self._fragment(name) + 1) * every // parts
            if (self.step - turn) % every == 0 and self.step >= turn:
                self.sent[self.step, name] = torch.stack([self.outer[name] - p for p in own]).mean(
                    dim=0
                )
            arrived = self.sent.pop((self.step - tau, name), None)
            if arrived is not None:
                self._outer_step(name, arrived)
                for p in own:
                    p.copy_(self.local.kept * p + (1 - self.local.kept) * self.outer[name])

    def _outer_step(self, name: str, gradient: Tensor) -> None:
        """Nesterov's momentum as torch and the DiLoCo paper's appendix have it."""
        velocity = self.velocity[name].mul_(self.local.outer_momentum).add_(gradient)
        step = gradient + self.local.outer_momentum * velocity if self.local.nesterov else velocity
        self.outer[name] = self.outer[name] - self.local.outer_lr * step

    def _fragment(self, name: str) -> int:
        if name.startswith("embed"):
            return 0
        return (
            int(name.split(".")[1]) % self.local.fragments
            if "layers" in name
            else self.local.fragments - 1
        )


def recipe_of(recipe: Recipe, **local: object) -> Recipe:
    return replace(recipe, local_sgd=replace(recipe.local_sgd, **local))  # type: ignore[arg-type]

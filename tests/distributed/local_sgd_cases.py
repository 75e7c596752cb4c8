"""DiLoCo in plain torch in one process, the referee of tests of local SGD: one plain model and one
AdamW a replica.

Written after the paper (arXiv 2311.08105, algorithm 1), tensor by tensor, with nothing of the
project's own outer loop.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.data.loader import Batch
from parallel3d.tools.bench.plain_torch.llama import PlainStack, token_loss
from tests.distributed.training_cases import make_loader, plain_stack


class PlainDiloco:
    """`recipe.parallel.dp_replicate` models that train apart on their shares of the global
    batch."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.local = recipe.local_sgd
        self.replicas = [plain_stack(recipe) for _ in range(recipe.parallel.dp_replicate)]
        self.outer = {
            name: p.detach().clone() for name, p in self.replicas[0].model.named_parameters()
        }
        self.velocity = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.step = 0

    def train_step(self) -> tuple[float, float]:
        """Trains a step. Returns the mean of the replicas' losses, and the root of the mean of
        their squared norms."""
        share = replace(self.recipe, parallel=ParallelConfig(dp_replicate=len(self.replicas)))
        results = []
        for index, replica in enumerate(self.replicas):
            results.append(replica.train_step(make_loader(share, index).batch(self.step)))
        self.step += 1
        assert self.local.sync_every is not None
        if self.step % self.local.sync_every == 0:
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
        for name in self.outer:
            own = [replica.model.get_parameter(name) for replica in self.replicas]
            gradient = torch.stack([self.outer[name] - p for p in own]).mean(dim=0)
            velocity = self.velocity[name].mul_(self.local.outer_momentum).add_(gradient)
            if self.local.nesterov:
                velocity = gradient + self.local.outer_momentum * velocity
            self.outer[name] = self.outer[name] - self.local.outer_lr * velocity
            for p in own:
                p.copy_(self.outer[name])

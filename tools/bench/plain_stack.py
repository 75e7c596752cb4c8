"""Training in one process with a plain torch loop: what every layout must reproduce, and the peer of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.recipe import Recipe
from parallel3d.tools.bench.plain_llama import PlainLlama
from parallel3d.tools.bench.plain_optimizer import plain_optimizers


class TokenBatch(Protocol):
    """Inputs and labels, int64 [microbatches, microbatch, S]."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy over the tokens of one microbatch: logits [B, S, V], labels [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainStack:
    """One process, whose `train_step` takes the whole global batch whatever layout `recipe.parallel` names."""

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
        self.grad_clip = recipe.train.grad_clip
        self.model = PlainLlama(recipe.model)
        self.model.load(weights)
        self.optimizers = plain_optimizers(self.model, recipe.optimizer)

    def train_step(self, batch: TokenBatch) -> tuple[float, float]:
        """One step on `batch`; returns the mean loss over its tokens and the norm of its gradient."""
        self.model.zero_grad()
        total = torch.zeros(())
        for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
            loss = token_loss(self.model(inputs), labels) / len(batch.inputs)
            loss.backward()
            total += loss.detach()
        # An infinite limit measures the norm and leaves the gradient as it is.
        limit = float("inf") if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for optimizer in self.optimizers:
            optimizer.step()
        return total.item(), norm.item()

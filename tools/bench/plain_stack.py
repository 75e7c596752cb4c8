"""Training in one process with a plain torch loop and torch's own optimizers: what every layout must reproduce, and the
peer of one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.recipe import OptimizerConfig, Recipe
from parallel3d.data.loader import Batch
from parallel3d.tools.bench.plain_llama import PlainLlama


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

    def train_step(self, batch: Batch) -> tuple[float, float]:
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


def plain_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Returns torch's own optimizers, at the peak learning rate, held constant. Muon steps the matrices of the blocks
    in `model.layers`."""
    config = config.resolved
    if config.name == "muon":
        matrices = [p for p in model.get_submodule("layers").parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        assert config.ns_dtype == "bf16", "torch's has no other"
        muon = torch.optim.Muon(
            matrices,
            lr=config.lr if config.muon_lr is None else config.muon_lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,  # type: ignore[arg-type]
            nesterov=config.nesterov,  # type: ignore[arg-type]
            ns_steps=config.ns_steps,  # type: ignore[arg-type]
            adjust_lr_fn=config.lr_adjust,
        )
        return [muon, adamw(rest, config)]
    groups = _groups(model.parameters(), config)
    if config.name == "sgd":
        momentum, nesterov = config.momentum or 0.0, bool(config.nesterov)
        return [torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov)]
    if config.name == "adafactor":
        decay, clip = config.beta2_decay, config.update_clip
        assert decay is not None and clip is not None
        return [torch.optim.Adafactor(groups, lr=config.lr, beta2_decay=decay, d=clip)]
    return [adamw(model.parameters(), config)]


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns AdamW at the peak learning rate, held constant. The first group, the matrices, decays; norms do not."""
    return torch.optim.AdamW(
        _groups(parameters, config), lr=config.lr, betas=config.betas, eps=config.eps, foreach=True
    )


def _groups(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[dict[str, object]]:
    parameters = list(parameters)
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

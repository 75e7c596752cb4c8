"""The optimizers of a recipe as torch has them, for one process: what those over sharded parameters must reproduce."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from parallel3d.config.recipe import OptimizerConfig


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
    if config.name == "sgd":
        momentum, nesterov = config.momentum or 0.0, bool(config.nesterov)
        return [
            torch.optim.SGD(_groups(model.parameters(), config), lr=config.lr, momentum=momentum, nesterov=nesterov)
        ]
    if config.name == "adafactor":
        decay, clip = config.beta2_decay, config.update_clip
        assert decay is not None and clip is not None
        return [torch.optim.Adafactor(_groups(model.parameters(), config), lr=config.lr, beta2_decay=decay, d=clip)]
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

"""The reference for a layout: the recipe's unsharded model, trained in one process with plain
PyTorch.

It shares the model class, the initial weights, the batches and the learning rate with the checked
layout. The training loop, the loss, the gradient accumulation and the optimizer are those of
PyTorch. A fault of the trainer, the pipeline or the sharding therefore shows as a difference. A
fault in the model's layers does not show if it is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from parallel3d.config.recipe import OptimizerConfig, ParallelConfig, Recipe
from parallel3d.layers.dropout import dropout_key
from parallel3d.layers.parameter import initialize
from parallel3d.layers.router import Router
from parallel3d.models import unsharded_model
from parallel3d.optimizers.build import is_hidden_matrix
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.record import (
    TrainedStep,
    collect,
    gradients_of,
    random_batches,
    record_steps,
    start_record,
)
from parallel3d.training.learning_rate import learning_rate


def record_plain(recipe: Recipe, whole_steps: int | None = None) -> TrainingRecord:
    """Trains a recipe in one process and records the same values as `record.record_recipe` does.
    Each global batch is one microbatch.
    """
    train = recipe.train
    sizes = recipe.model
    config = recipe.optimizer
    parallel = ParallelConfig(microbatch_size=train.global_batch_size)
    batches = random_batches(replace(recipe, parallel=parallel))
    model = unsharded_model(sizes)
    initialize(model, train.seed, "cpu")
    parameters = list(model.named_parameters())
    record = start_record(parallel, parameters, train.seed)
    record.parameter_count = sum(parameter.numel() for parameter in model.parameters())
    matrices = []
    for name, parameter in parameters:
        owner = model.get_submodule(name.rpartition(".")[0])
        if is_hidden_matrix(name, owner, parameter.ndim):
            matrices.append(parameter)
    optimizers = plain_optimizers(model, config, matrices)
    routers = {name: part for name, part in model.named_modules() if isinstance(part, Router)}

    def rate(step: int) -> float:
        return learning_rate(config, step + 1, train.steps) / config.lr

    schedulers = [LambdaLR(optimizer, rate) for optimizer in optimizers]

    def loss_of(step: int) -> Tensor:
        batch = batches.batch(step)
        keywords: dict[str, Any] = {}
        if batch.documents is not None:
            keywords["documents"] = batch.documents[0]
        if sizes.dropout or sizes.attention_dropout:
            keywords["key"] = dropout_key(train.seed, step, batch.samples)[0]
        output = model(batch.inputs[0], **keywords)
        logits = getattr(output, "logits", output).double().flatten(0, -2)
        labels = batch.labels.flatten()
        loss = F.cross_entropy(logits, labels)
        log_sums = logits.logsumexp(-1)[labels != -100]
        return loss + train.z_loss * log_sums.square().mean()

    def train_step(step: int, is_whole: bool) -> TrainedStep:
        model.zero_grad()
        loss = loss_of(step)
        loss.backward()
        gradients = gradients_of(parameters) if is_whole else {}
        limit = float("inf") if train.grad_clip is None else train.grad_clip
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        # torch.optim.Muon would compute in bfloat16.
        with mock.patch.object(Tensor, "bfloat16", Tensor.double):
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
        loads = {name: router.take_load() for name, router in routers.items()}
        for name, router in routers.items():
            router.balance(loads[name])
        return loss.item(), norm.item(), gradients, collect(loads.items())

    record_steps(record, [model], parameters, train_step, train.steps, whole_steps)
    return record


def plain_optimizers(
    model: nn.Module, config: OptimizerConfig, matrices: Sequence[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Returns torch optimizers with the peak learning rate. Muon updates `matrices`, AdamW the
    other parameters.
    """
    config = config.resolved
    if config.name == "muon":
        taken = set(matrices)
        rest = [parameter for parameter in model.parameters() if parameter not in taken]
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
    groups = parameter_groups(model.parameters(), config)
    if config.name == "sgd":
        momentum = config.momentum or 0.0
        nesterov = bool(config.nesterov)
        return [torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov)]
    return [adamw(model.parameters(), config)]


def parameter_groups(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> list[dict[str, object]]:
    """Returns torch parameter groups: matrices with weight decay, norms and biases without."""
    matrices: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for parameter in parameters:
        chosen = matrices if parameter.ndim >= 2 else norms
        chosen.append(parameter)
    groups: list[dict[str, object]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    parameters = list(parameters)
    is_on_gpu = any(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(
        parameter_groups(parameters, config),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # The fused kernel is the fastest on GPUs, but not on CPUs.
        fused=is_on_gpu,
        foreach=not is_on_gpu,
    )

"""Records the tensors, losses and norms of a few training steps in one process or in a layout.

Each rank assembles full parameters and gradients, and rank 0 keeps the view of every rank. A
comparison can therefore find replicas that differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.convert.parallel_modules import PackedColumnParallel
from parallel3d.data.loader import BatchLoader
from parallel3d.data.windows import ShuffledWindows, TokensInMemory
from parallel3d.layers import linear, loss
from parallel3d.layers.collectives import gather
from parallel3d.layers.experts import ParallelExperts
from parallel3d.layers.parameter import generator_of, shard_like
from parallel3d.layers.router import Router
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.tools.local_ranks import CPU
from parallel3d.torch_private import is_in_backward
from parallel3d.training.trainer import Trainer
from parallel3d.training.worker import training_loader

# Standard deviation of the noise added to weights. Zero biases and unit scales would hide faults.
JITTER = 0.02


# (loss, gradient norm, gradients, load of each expert by router)
TrainedStep = tuple[float, float, Views, Views]


def record_recipe(recipe: Recipe, whole_steps: int | None = None) -> TrainingRecord:
    """Trains a recipe and records the steps. Collective; only the record of rank 0 is complete.

    Batches contain random token IDs instead of the recipe's data. Tensors are kept for the first
    `whole_steps` steps (None: all), losses and norms for all steps. The small model is forced to
    use code paths that normally only large models use: fused weight gradients and a loss that
    overwrites the logits. Every second step computes the loss in chunks.
    """
    train = recipe.train
    mesh = build_mesh(recipe.parallel, "cpu")
    model = model_class(recipe.model.architecture)
    trainer = Trainer(recipe, mesh=mesh, device=CPU, model_class=model)
    tensors = []
    for parameter in trainer.parameters:
        own = parameter.part.distributed(parameter.local.detach())
        tensors.append((parameter.name, own))
    record = start_record(recipe.parallel, tensors, train.seed)
    record.parameter_count = trainer.progress.parameters
    trainer.engine.publish()
    loader = random_batches(recipe)
    chunk_tokens = recipe.parallel.microbatch_size * recipe.own_seq_len // 2 + 1
    modules = [stage.module for stage in trainer.stages]

    def train_step(step: int, is_whole: bool) -> TrainedStep:
        gradients: list[tuple[str, Tensor]] = []

        def keep(parameter: LocalParameter) -> None:
            """Copies a gradient before it is scaled and clipped."""
            grad = parameter.local.grad
            if grad is not None:
                copy = parameter.part.distributed(grad.clone())
                gradients.append((parameter.name, copy))

        trainer.loss.chunk_tokens = chunk_tokens if step % 2 else None
        trainer.loss.use_head(modules)
        result = trainer.train_step(loader.batch(step), observe=keep if is_whole else None)
        loads = trainer.experts.loads if trainer.experts is not None else {}
        return result.loss, result.grad_norm, collect(gradients), collect(loads.items())

    with (
        mock.patch.object(linear, "FUSED_FROM_ELEMENTS", 0),
        mock.patch.object(loss, "PLAIN_BELOW_ELEMENTS", 0),
    ):
        record_steps(record, modules, tensors, train_step, train.steps, whole_steps)
    return record


def random_batches(recipe: Recipe) -> BatchLoader:
    """Returns a loader of random token IDs for this data-parallel rank, with document borders if
    the recipe masks documents.
    """
    train = recipe.train
    generator = np.random.default_rng(train.seed)
    length = train.steps * train.global_batch_size * train.seq_len + 1
    ids = generator.integers(0, recipe.model.vocab, length, dtype=np.int32)
    document_end = None
    if recipe.data.documents == "mask":
        document_end = 0
        ids[::7] = document_end
    source = ShuffledWindows(TokensInMemory(ids), seq_len=train.seq_len, seed=train.seed)
    return training_loader(recipe, source, dist.get_rank(), document_end)


def start_record(
    parallel: ParallelConfig, tensors: Sequence[tuple[str, Tensor]], seed: int
) -> TrainingRecord:
    """Records the initial parameters, adds noise to them, and records the result. Training starts
    there.
    """
    initial = collect(tensors)
    for name, tensor in tensors:
        # The noise depends only on the seed and the name, so all layouts get the same.
        generator = generator_of(f"jitter/{seed}/{name}")
        noise = torch.randn(tuple(tensor.shape), generator=generator)
        jittered = whole(tensor) + (JITTER * noise).to(tensor.dtype)
        put(tensor, jittered)
    return TrainingRecord(parallel, initial, collect(tensors))


def record_steps(
    record: TrainingRecord,
    models: list[nn.Module],
    tensors: Sequence[tuple[str, Tensor]],
    train_step: Callable[[int, bool], TrainedStep],
    steps: int,
    whole_steps: int | None = None,
) -> None:
    """Trains `steps` steps and records them.

    `train_step` gets the step's index, and True if the step's tensors are kept: in the first
    `whole_steps` steps (None: all). `tensors` are the parameters. The outputs of a module with
    parameters are recorded for all microbatches, concatenated, if they have the same shape.
    Recomputed forward passes and heads that leave their matmul to the loss are left out.
    """
    outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    choices: list[Tensor] = []  # Those of a router, until its module returns.

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_in_backward() or getattr(module, "is_deferred", False):
            return
        if isinstance(module, Router):
            choices.append(choices_of(module, *inputs, *output))
        elif isinstance(module, ParallelExperts):
            tokens = output.shape[:-1]
            own = choices.pop()
            if len(own) < tokens.numel():  # Each tp rank routes a part of the tokens.
                own = gather(own, module.axis, 0)
            outputs[f"{name}.router"].append(own.view(*tokens, -1))
        if isinstance(output, Tensor) and output.ndim >= 2:
            outputs[name].append(output.detach().clone())

    hooks = []
    for model in models:
        for name, module in model.named_modules():
            has_parameters = any(True for _ in module.parameters())
            # Packed matrices: a rank's output is no range of the features.
            if name and has_parameters and not isinstance(module, PackedColumnParallel):
                hook = partial(keep, plain_name(name))
                hooks.append(module.register_forward_hook(hook))
    for step in range(steps):
        outputs.clear()
        is_whole = whole_steps is None or step < whole_steps
        loss, grad_norm, gradients, loads = train_step(step, is_whole)
        record.curve.append((loss, grad_norm))
        if is_whole:
            alike = []
            for name, parts in outputs.items():
                shapes = {part.shape for part in parts}
                if len(shapes) == 1:
                    alike.append((name, torch.cat(parts)))
            kept = StepRecord(
                loss=loss,
                grad_norm=grad_norm,
                activations=collect(alike),
                gradients=gradients,
                parameters=collect(tensors),
                loads=loads,
            )
            record.steps.append(kept)
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def choices_of(router: Router, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the experts [tokens, per_token] of each token and, as the last column, the margin.

    The margin is the difference between the scores of the last expert that is chosen and of the
    first that is not.
    """
    scores = F.linear(x.float(), local_tensor(router.get_parameter("weight")).float())
    scores = scores.softmax(-1) if router.config.score == "softmax" else scores.sigmoid()
    if router.bias is not None:
        scores = scores + router.bias
    ordered = F.pad(scores.sort(descending=True).values, (0, 1), value=-1.0)
    last = chosen.shape[1]
    return torch.cat((chosen.float(), (ordered[:, last - 1] - ordered[:, last]).unsqueeze(1)), 1)


def plain_name(name: str) -> str:
    """Returns a parameter name without the prefixes that DDP and activation checkpointing add."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def collect(tensors: Iterable[tuple[str, Tensor]]) -> Views:
    """Gathers each rank's view of the full tensors on rank 0, as arrays. Ranks with equal views
    share an array. Returns an empty dict on other ranks.
    """
    mine = {name: whole(tensor).cpu().numpy() for name, tensor in tensors}
    everyone = None
    if dist.get_rank() == 0:
        everyone = [mine] * dist.get_world_size()
    dist.gather_object(mine, everyone)
    views: defaultdict[str, dict[int, Array]] = defaultdict(dict)
    for rank, theirs in enumerate(everyone or []):
        for name, array in theirs.items():
            seen = views[name]
            alike = (known for known in seen.values() if np.array_equal(known, array))
            seen[rank] = next(alike, array)
    return dict(views)


def gradients_of(parameters: Iterable[tuple[str, Tensor]]) -> Views:
    return collect((name, p.grad) for name, p in parameters if p.grad is not None)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Returns a copy of the full tensor. For a DTensor, every rank of its mesh must call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Writes this rank's shard of the full tensor `value` to a parameter."""
    if isinstance(tensor, DTensor):
        value = local_tensor(shard_like(value, tensor))
    local_tensor(tensor.detach()).copy_(value)

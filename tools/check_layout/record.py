"""What a few steps of training leave behind, written down by the ranks that train: on one process, or in a layout.

Tensors are global: of its own part each rank makes the whole, and rank 0 keeps what every rank then sees, so that
copies that should agree can be found not to.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import BatchLoader
from parallel3d.layers.gradients import local_tensor
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.parallelize import inside_compiled
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.torch_private import is_in_backward
from parallel3d.training.trainer import Trainer
from parallel3d.training.worker import training_loader

JITTER = 0.02  # added to every weight, because a bias of 0 or a scale of 1 hides what is done to it


def record_recipe(recipe: Recipe) -> TrainingRecord:
    """Trains on every rank of the default group; the record is whole on rank 0 alone."""
    mesh, rank = build_mesh(recipe.parallel, "cpu"), dist.get_rank()
    trainer = Trainer(recipe, mesh=mesh, device=torch.device("cpu"), model_class=model_class(recipe.model.architecture))
    record = TrainingRecord()
    tensors = [(p.name, p.distributed(p.local.detach())) for p in trainer.parameters]
    record.initial = collect(tensors)
    jitter(tensors, recipe.train.seed)
    for data in trainer.data:
        data.publish()
    record.start = collect(tensors)
    record.split = _merged({p.name: p.spec.dim for p in trainer.parameters})
    record.tied = sorted(trainer.tied)
    loader = random_loader(recipe, rank)
    for step in range(recipe.train.steps):
        with activations_of([stage.module for stage in trainer.stages]) as activations:
            gradients: list[tuple[str, Tensor | None]] = []
            result = trainer.train_step(loader.batch(step), observe=partial(_keep_gradient, gradients))
        parameters = collect((p.name, p.distributed(p.local.detach())) for p in trainer.parameters)
        seen = gathered(joined(activations))
        record.steps.append(StepRecord(result.loss, result.grad_norm, seen, collect(gradients), parameters))
    return record


def _keep_gradient(kept: list[tuple[str, Tensor | None]], parameter: LocalParameter) -> None:
    """Keeps a copy of the gradient between the norm and the clipping, because the gradient is scaled or dropped
    next."""
    grad = parameter.local.grad
    kept.append((parameter.name, None if grad is None else parameter.distributed(grad.clone())))


def random_loader(recipe: Recipe, rank: int) -> BatchLoader:
    """Returns batches of random ids for the data rank that `rank` belongs to. The run's own data is not read."""
    train = recipe.train
    length = train.steps * train.global_batch_size * train.seq_len + 1
    ids = np.random.default_rng(train.seed).integers(0, recipe.model.vocab, length, dtype=np.int32)
    return training_loader(recipe, ids, rank)


def joined(activations: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Returns the microbatches of each module as one batch, where they have one shape."""
    alike = {name: parts for name, parts in activations.items() if len({part.shape for part in parts}) == 1}
    return {name: torch.cat(parts) for name, parts in alike.items()}


def collect(tensors: Iterable[tuple[str, Tensor | None]]) -> Views:
    """Returns, on rank 0, what every rank sees of these as global tensors. A gradient of None is left out."""
    return gathered({name: whole(tensor) for name, tensor in tensors if tensor is not None})


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Returns a copy of the global tensor. Every rank of a DTensor's mesh calls it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gathered(tensors: dict[str, Tensor]) -> Views:
    """Returns every rank's tensors by name on rank 0, equal ones as one array; nothing elsewhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    everyone: list[dict[str, Array]] | None = [{}] * size if rank == 0 else None
    dist.gather_object(mine, everyone)
    views: Views = {}
    for other, theirs in enumerate(everyone or []):
        for name, array in theirs.items():
            seen = views.setdefault(name, {})
            seen[other] = next((known for known in seen.values() if np.array_equal(known, array)), array)
    return views


def _merged(mine: dict[str, int | None]) -> dict[str, int | None]:
    everyone: list[dict[str, int | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: dim for theirs in everyone for name, dim in theirs.items()}


@torch.no_grad()
def jitter(tensors: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Adds noise to every parameter in place, drawn whole by its name, the same in every layout."""
    done: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) not in done:
            done.add(id(tensor))
            digest = hashlib.blake2b(f"jitter/{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            noise = JITTER * torch.randn(tuple(tensor.shape), generator=generator)
            put(tensor, whole(tensor) + noise.to(tensor.dtype))


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Writes a global value into this rank's part of a parameter."""
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    local_tensor(tensor.detach()).copy_(value)


@contextmanager
def activations_of(models: Iterable[nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Yields the outputs of every module that has parameters, one tensor a microbatch, in the order of their first
    forward. Forwards that a backward recomputes and the parts of a compiled block are left out."""
    outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keeper(name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            if not is_in_backward() and isinstance(output, Tensor) and output.ndim >= 2:
                outputs[name].append(output.detach().clone())

        return keep

    models = list(models)
    hidden = {module for model in models for module in inside_compiled(model)}
    hooks = [
        module.register_forward_hook(keeper(name))
        for model in models
        for name, module in model.named_modules()
        if name and module not in hidden and any(True for _ in module.parameters())
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()

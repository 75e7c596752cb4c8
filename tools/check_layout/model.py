"""`--model module:function`: trains a few steps of the model that a function builds, with plain
torch.

The function gets the mesh (axes pp, of size 1, dp_replicate, dp_shard and tp), or None in one
process. Its keyword arguments are `vocab` and, if given, `layers` and `hidden`. The returned module
maps ids [B, S] to logits [B, S, V], to this rank's shard [B, S, V / tp], or to an object with the
attribute `logits`. After the backward pass of this rank's mean loss, gradients must be means over
the data-parallel ranks, as DDP and `fully_shard` leave them.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.mesh import Role, build_mesh, dp_rank
from parallel3d.tools.check_layout.compare import norm_of
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.record import (
    TrainedStep,
    gradients_of,
    plain_name,
    put,
    record_steps,
    start_record,
)
from parallel3d.tools.check_layout.shrink import EPS, SEQ_LEN

BATCH = 8  # Sequences per step, rounded up to a multiple of the data-parallel ranks.
_LR = 1e-3
_SEED = 0


@dataclass(frozen=True)
class ModelCheck:
    """The model to build, its layout, and the number of steps to train."""

    target: str  # module:function
    parallel: ParallelConfig
    options: Mapping[str, int]  # Keyword arguments of the function, including `vocab`.
    steps: int


def record_model(job: ModelCheck) -> TrainingRecord:
    """Trains the model and records the steps. Collective; only the record of rank 0 is complete."""
    parallel = job.parallel
    mesh = build_mesh(parallel, "cpu") if parallel.world_size > 1 else None
    build = load_builder(job)
    torch.manual_seed(_SEED)
    alone = build(None)
    model = alone
    if mesh is not None:
        torch.manual_seed(_SEED)
        try:
            model = build(mesh)
        except ValueError as error:  # For example, invalid rules for tensor_parallelize.
            raise ConfigError(f"--model {job.target}: {error}") from error
        _copy_weights(alone, model)
    parameters = _named(model)
    record = start_record(parallel, parameters, _SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, eps=EPS)
    own_batch = -(-BATCH // parallel.dp)
    first = own_batch * dp_rank(parallel, dist.get_rank())

    def train_step(step: int, is_whole: bool) -> TrainedStep:
        """Trains on this data-parallel rank's share of the batch. Returns the mean loss over all
        ranks.
        """
        generator = torch.Generator().manual_seed(_SEED + step)
        shape = (own_batch * parallel.dp, SEQ_LEN + 1)
        vocab = job.options["vocab"]
        ids = torch.randint(0, vocab, shape, generator=generator)[first : first + own_batch]
        labels = ids[:, 1:].contiguous()
        try:
            output = model(ids[:, :-1].contiguous())
        except RuntimeError as error:
            words = f"its forward pass failed with {parallel.label}: {error}"
            raise ConfigError(f"--model {job.target}: {words}") from error
        logits = getattr(output, "logits", output)
        if mesh is not None and logits.shape[-1] < vocab:
            loss = vocab_parallel_cross_entropy(logits, labels, mesh[Role.SPLIT_TENSORS]).mean()
        else:
            loss = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
        loss.backward()
        total = loss.detach().double() / parallel.world_size
        dist.all_reduce(total)
        gradients = gradients_of(parameters)
        optimizer.step()
        optimizer.zero_grad()
        return float(total), norm_of(gradients), gradients, {}

    record_steps(record, [model], parameters, train_step, job.steps)
    return record


def load_builder(job: ModelCheck) -> Callable[[DeviceMesh | None], nn.Module]:
    """Imports the function of the job and binds its options. Raises ConfigError if the function
    does not exist or does not accept an option.
    """
    module, _, name = job.target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(import_module(module), name)
        inspect.signature(build).bind(None, **job.options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--model {job.target}: {error}; must be module:function of a function (mesh, *, "
            "vocab, and your options), such as my_model:build, importable here"
        ) from error
    return partial(build, **job.options)


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    weights = dict(_named(source))
    for name, parameter in _named(target):
        shape = list(weights[name].shape) if name in weights else "no parameter"
        if shape != list(parameter.shape):
            raise ConfigError(
                f"{name}: has shape {list(parameter.shape)} in the layout but {shape} in one "
                "process; keep the names, and use a DTensor, whose shape is that of the full tensor"
            )
        put(parameter, weights[name].detach())


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(plain_name(name), parameter) for name, parameter in model.named_parameters()]

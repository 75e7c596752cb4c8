"""Builds the optimizer of a recipe for this rank's parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig, OptimizerName
from parallel3d.layers.experts import ExpertWeights
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.parameter import ParallelModule
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.optimizers.low_precision import LowPrecisionAdamW, LowPrecisionSGD
from parallel3d.optimizers.muon import DTYPES, Muon
from parallel3d.sharding.optimizer_parts import LocalParameter


class LocalOptimizer(torch.optim.Optimizer):
    """One or several optimizers for this rank's parameters, with shared groups and states.

    States exist before the first step, so that a checkpoint can be loaded into them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], label: str) -> None:
        groups = list(chain.from_iterable(part.param_groups for part in parts))
        # torch requires a group, even if all parameters of this rank are frozen.
        super().__init__(groups or [{"params": []}], {})
        self.label = label  # Identifies the states in a checkpoint.
        self._parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()

    def set_step(self, step: int) -> None:
        """Sets the step count in the states that have one, which are those of AdamW."""
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(float(step))


def build_optimizer(
    parameters: Sequence[LocalParameter], config: OptimizerConfig, mesh: DeviceMesh
) -> LocalOptimizer:
    """Returns the optimizer of a recipe, with weight decay on matrices only.

    Every rank of `mesh` must call it.
    """
    config = config.resolved
    label: str = config.name
    if config.name == "sgd" and not config.momentum:
        label = "sgd without momentum"
    by_name: dict[OptimizerName, list[LocalParameter]] = {config.name: [*parameters]}
    if config.name == "muon":
        by_name = {"muon": [], "adamw": []}
        for own in parameters:
            is_matrix = is_hidden_matrix(own.name, own.module, len(own.spec.shape))
            by_name["muon" if is_matrix else "adamw"].append(own)
    parts = [_optimizer(name, own, config, mesh) for name, own in by_name.items() if own]
    return LocalOptimizer(parts, label)


def is_hidden_matrix(name: str, owner: nn.Module, ndim: int) -> bool:
    """Returns True if Muon updates a parameter: the weight of a linear layer other than the head.

    In a model without parallel3d's layers, Muon updates all matrices in the blocks except
    embeddings.
    """
    if isinstance(owner, ParallelModule):
        is_linear = isinstance(owner, ColumnParallelLinear | RowParallelLinear | ExpertWeights)
        return is_linear and not isinstance(owner, VocabParallelHead) and ndim == 2
    is_in_block = re.search(r"\.\d+\.", name) is not None
    return is_in_block and not isinstance(owner, nn.Embedding) and ndim == 2


def _optimizer(
    name: OptimizerName,
    parameters: Sequence[LocalParameter],
    config: OptimizerConfig,
    mesh: DeviceMesh,
) -> torch.optim.Optimizer:
    """Builds an optimizer with zero-initialized states.

    AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) and SGD, which adds weight decay to the
    gradient, are those of torch.
    """
    matrices = [p.local for p in parameters if len(p.spec.shape) > 1]
    vectors = [p.local for p in parameters if len(p.spec.shape) <= 1]
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    groups = [decayed, {"params": vectors, "weight_decay": 0.0}]
    own_dtype = parameters[0].local.dtype
    dtype = own_dtype
    if config.state_dtype is not None:
        dtype = DTYPES[config.state_dtype]
    names = ["momentum_buffer"]
    optimizer: torch.optim.Optimizer
    if name == "muon":
        optimizer = Muon(parameters, mesh, config)
    elif name == "sgd":
        sgd = torch.optim.SGD if dtype == own_dtype else LowPrecisionSGD
        momentum = config.momentum or 0.0
        optimizer = sgd(groups, config.lr, momentum, nesterov=bool(config.nesterov))
        if not momentum:
            names = []
    else:
        adamw = torch.optim.AdamW if dtype == own_dtype else LowPrecisionAdamW
        optimizer = adamw(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        names = ["exp_avg", "exp_avg_sq"]
    for parameter in parameters:
        local = parameter.local
        states = {state: torch.zeros_like(local, dtype=dtype) for state in names}
        if name == "adamw":  # The fused AdamW kernel reads the step from a tensor on the device.
            states["step"] = torch.zeros((), device=local.device)
        optimizer.state[local] = states
    return optimizer

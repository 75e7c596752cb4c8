"""Builds the optimizer of this rank's parts, with its states, from the `optimizer` section of a
recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig, OptimizerName
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.optimizers.low_precision import LowPrecisionAdamW, LowPrecisionSGD
from parallel3d.optimizers.muon import DTYPES, Muon
from parallel3d.sharding.optimizer_parts import LocalParameter


class LocalOptimizer(torch.optim.Optimizer):
    """Steps all of this rank's parts by one optimizer or several, whose groups and states it
    shares. The states are there before the first step, so that a checkpoint has something to read
    into."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], label: str) -> None:
        groups = [{"params": group["params"]} for part in parts for group in part.param_groups]
        # all parameters of this rank may be frozen
        super().__init__(groups or [{"params": []}], {})
        self.label = label  # which optimizer's states these are, for a checkpoint to compare
        self.param_groups = [group for part in parts for group in part.param_groups]
        self._parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()

    def set_step(self, step: int) -> None:
        """Tells the optimizers whose arithmetic depends on it how many steps they have done."""
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(float(step))


def build_optimizer(
    parameters: Sequence[LocalParameter], config: OptimizerConfig, mesh: DeviceMesh
) -> LocalOptimizer:
    """Returns the optimizer that a recipe names, with weight decay on matrices alone. Every rank of
    `mesh` calls it."""
    config = config.resolved
    label = "sgd without momentum" if config.name == "sgd" and not config.momentum else config.name
    groups: list[tuple[OptimizerName, Sequence[LocalParameter]]] = [(config.name, parameters)]
    if config.name == "muon":
        matrices = [p for p in parameters if is_hidden_matrix(p)]
        others = [p for p in parameters if not is_hidden_matrix(p)]
        groups = [("muon", matrices), ("adamw", others)]
    return LocalOptimizer([_optimizer(name, p, config, mesh) for name, p in groups if p], label)


def is_hidden_matrix(parameter: LocalParameter) -> bool:
    """Returns whether Muon steps a parameter: the weight of a linear layer other than the head."""
    is_linear = isinstance(parameter.module, ColumnParallelLinear | RowParallelLinear)
    is_head = isinstance(parameter.module, VocabParallelHead)
    return is_linear and not is_head and len(parameter.spec.shape) == 2


def _optimizer(
    name: OptimizerName,
    parameters: Sequence[LocalParameter],
    config: OptimizerConfig,
    mesh: DeviceMesh,
) -> torch.optim.Optimizer:
    """Builds an optimizer with the states that it starts from. AdamW (Loshchilov and Hutter 2019,
    arXiv 1711.05101) and SGD, whose weight decay is added to the gradient, are torch's."""
    groups: list[dict[str, Any]] = []
    for decay, is_matrix in ((config.weight_decay, True), (0.0, False)):
        chosen = [p.local for p in parameters if (len(p.spec.shape) > 1) == is_matrix]
        if chosen:
            groups.append({"params": chosen, "weight_decay": decay})
    own_dtype = parameters[0].local.dtype
    dtype = own_dtype if config.state_dtype is None else DTYPES[config.state_dtype]
    optimizer: torch.optim.Optimizer
    names = ["momentum_buffer"]
    if name == "muon":
        optimizer = Muon(parameters, mesh, config)
    elif name == "sgd":
        sgd = torch.optim.SGD if dtype == own_dtype else LowPrecisionSGD
        optimizer = sgd(
            groups, lr=config.lr, momentum=config.momentum or 0.0, nesterov=bool(config.nesterov)
        )
        names = names if config.momentum else []
    else:
        adamw = torch.optim.AdamW if dtype == own_dtype else LowPrecisionAdamW
        optimizer = adamw(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        names = ["exp_avg", "exp_avg_sq"]
    for parameter in parameters:
        local = parameter.local
        states = {state: torch.zeros_like(local, dtype=dtype) for state in names}
        if name == "adamw":  # whose kernel reads the step on the device
            states["step"] = torch.zeros((), device=local.device)
        optimizer.state[local] = states
    return optimizer

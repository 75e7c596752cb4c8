"""Builds the optimizer of this rank's parts, with its states, from the `optimizer` section of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig, OptimizerName
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.optimizers.adafactor import Adafactor, start_states, without_dim
from parallel3d.optimizers.muon import DTYPES, Muon
from parallel3d.optimizers.rounding import LowPrecisionAdamW, LowPrecisionSGD
from parallel3d.sharding.optimizer_parts import LocalParameter

_OVER_DIM = {"row_var": -1, "col_var": -2}  # the states that are a parameter's statistics over a dim


class LocalOptimizer(torch.optim.Optimizer):
    """Steps all of this rank's parts by one optimizer or several, whose groups and states it shares. The states are
    there before the first step, so that a checkpoint has something to read into."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], label: str) -> None:
        groups = [{"params": group["params"]} for part in parts for group in part.param_groups]
        super().__init__(groups or [{"params": []}], {})  # all parameters of this rank may be frozen
        self.label = label  # which optimizer's states these are, for a checkpoint to compare
        self.param_groups = [group for part in parts for group in part.param_groups]
        self._parts = parts
        self._part_of = {p: part for part in parts for group in part.param_groups for p in group["params"]}
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()

    def part_of(self, parameter: LocalParameter) -> torch.optim.Optimizer:
        """Returns the optimizer that steps a parameter. `build_optimizer` with `each` makes one for each."""
        return self._part_of[parameter.local]

    def set_step(self, step: int) -> None:
        """Tells the optimizers whose arithmetic depends on it how many steps they have done."""
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(float(step))

    def distributed_states(self, parameter: LocalParameter) -> Iterator[tuple[str, Tensor]]:
        """Yields the states of a parameter, each as the tensor that all ranks hold together, in the state's memory."""
        for name, state in self.state[parameter.local].items():
            if name in _OVER_DIM:
                yield name, without_dim(parameter, parameter.local.ndim + _OVER_DIM[name], state)
            elif name != "step":
                yield name, parameter.distributed(state)


def build_optimizer(
    parameters: Sequence[LocalParameter], config: OptimizerConfig, mesh: DeviceMesh, *, each: bool = False
) -> LocalOptimizer:
    """Returns the optimizer that a recipe names, with weight decay on matrices alone. Every rank of `mesh` calls it.
    With `each`, AdamW or SGD is one optimizer for each parameter, which can be stepped by itself."""
    config = config.resolved
    label = "sgd without momentum" if config.name == "sgd" and not config.momentum else config.name
    together: list[tuple[OptimizerName, Sequence[LocalParameter]]]
    together = [(config.name, [parameter]) for parameter in parameters] if each else [(config.name, parameters)]
    if config.name == "muon":
        matrices = [p for p in parameters if is_hidden_matrix(p)]
        together = [("muon", matrices), ("adamw", [p for p in parameters if not is_hidden_matrix(p)])]
    return LocalOptimizer([_optimizer(name, some, config, mesh) for name, some in together if some], label)


def is_hidden_matrix(parameter: LocalParameter) -> bool:
    """Returns whether Muon steps a parameter: the weight of a linear layer other than the head."""
    module = parameter.module
    is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
    return is_linear and not isinstance(module, VocabParallelHead) and len(parameter.spec.shape) == 2


def _optimizer(
    name: OptimizerName, parameters: Sequence[LocalParameter], config: OptimizerConfig, mesh: DeviceMesh
) -> torch.optim.Optimizer:
    """Builds an optimizer with the states that it starts from. AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) and
    SGD, whose weight decay is added to the gradient, are torch's."""
    matrices = [p for p in parameters if len(p.spec.shape) > 1]
    vectors = [p for p in parameters if len(p.spec.shape) <= 1]
    groups: list[dict[str, Any]] = [  # torch's, each with its LocalParameters as well
        {"params": [p.local for p in some], "parameters": some, "weight_decay": decay}
        for some, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if some
    ]
    own_dtype = parameters[0].local.dtype
    dtype = own_dtype if config.state_dtype is None else DTYPES[config.state_dtype]
    optimizer: torch.optim.Optimizer
    names = ["momentum_buffer"]
    if name == "muon":
        optimizer = Muon(parameters, mesh, config)
    elif name == "adafactor":
        assert config.beta2_decay is not None and config.update_clip is not None
        optimizer = Adafactor(groups, lr=config.lr, beta2_decay=config.beta2_decay, update_clip=config.update_clip)
    elif name == "sgd":
        sgd = torch.optim.SGD if dtype == own_dtype else LowPrecisionSGD
        optimizer = sgd(groups, lr=config.lr, momentum=config.momentum or 0.0, nesterov=bool(config.nesterov))
        names = names if config.momentum else []
    else:
        adamw = torch.optim.AdamW if dtype == own_dtype else LowPrecisionAdamW
        optimizer = adamw(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        names = ["exp_avg", "exp_avg_sq"]
    for parameter in parameters:
        local = parameter.local
        if name == "adafactor":
            states = start_states(local)
        else:
            states = {state: torch.zeros_like(local, dtype=dtype) for state in names}
        if name in ("adamw", "adafactor"):  # the kernel of AdamW reads it on the device, and Adafactor on the host
            states["step"] = torch.zeros((), device=local.device if name == "adamw" else "cpu")
        optimizer.state[local] = states
    return optimizer

"""Builds the optimizer of this rank's parts, with its states, from the `optimizer` section of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import OptimizerConfig
from parallel3d.layers.head import VocabParallelHead
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.optimizers import adafactor
from parallel3d.optimizers.adafactor import Adafactor
from parallel3d.optimizers.low_precision_state import LowPrecisionAdamW, LowPrecisionSGD
from parallel3d.optimizers.muon import Muon, MuonSettings
from parallel3d.optimizers.parameter_sharding import without_dim
from parallel3d.sharding.optimizer_parts import LocalParameter

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_OVER_DIM = {"row_var": -1, "col_var": -2}  # the states that are a parameter's statistics over a dim


class LocalOptimizer(torch.optim.Optimizer):
    """Steps all of this rank's parts by one optimizer or several, whose groups and states it shares. The states are
    there before the first step, so that a checkpoint has something to read into."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], label: str) -> None:
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
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
    together = [[parameter] for parameter in parameters] if each else [parameters]
    return LocalOptimizer([part for some in together for part in _optimizers(some, config, mesh)], label)


def _optimizers(
    parameters: Sequence[LocalParameter], config: OptimizerConfig, mesh: DeviceMesh
) -> list[torch.optim.Optimizer]:
    if config.name == "muon":
        matrices = [p for p in parameters if is_hidden_matrix(p)]
        rest = [p for p in parameters if not is_hidden_matrix(p)]
        return [*_muon(matrices, config, mesh), *_adamw(rest, config)]
    if config.name == "sgd":
        return _sgd(parameters, config)
    if config.name == "adafactor":
        return _adafactor(parameters, config)
    return _adamw(parameters, config)


def is_hidden_matrix(parameter: LocalParameter) -> bool:
    """Returns whether Muon steps a parameter: the weight of a linear layer other than the head."""
    module = parameter.module
    is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
    return is_linear and not isinstance(module, VocabParallelHead) and len(parameter.spec.shape) == 2


def _adamw(parameters: Sequence[LocalParameter], config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Builds AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): torch's, if states are as wide as parameters."""
    if not parameters:
        return []
    groups = _groups(parameters, config.weight_decay)
    dtype = _state_dtype(parameters, config)
    optimizer: torch.optim.Optimizer
    if dtype == parameters[0].local.dtype:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    else:
        optimizer = LowPrecisionAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter.local, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter.local] = {"step": _zero_steps(parameter), **moments}
    return [optimizer]


def _sgd(parameters: Sequence[LocalParameter], config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Builds SGD as torch has it: weight decay is added to the gradient."""
    groups = _groups(parameters, config.weight_decay)
    momentum, nesterov = config.momentum, config.nesterov
    assert momentum is not None and nesterov is not None
    dtype = _state_dtype(parameters, config)
    optimizer: torch.optim.Optimizer
    if dtype == parameters[0].local.dtype:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov)
    else:
        optimizer = LowPrecisionSGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov)
    for parameter in parameters if momentum else ():
        optimizer.state[parameter.local] = {"momentum_buffer": torch.zeros_like(parameter.local, dtype=dtype)}
    return [optimizer]


def _muon(matrices: Sequence[LocalParameter], config: OptimizerConfig, mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    if not matrices:
        return []
    assert config.momentum is not None and config.nesterov is not None and config.ns_steps is not None
    assert config.lr_adjust is not None and config.ns_dtype is not None
    settings = MuonSettings(
        lr=config.lr,
        lr_ratio=1.0 if config.muon_lr is None else config.muon_lr / config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        ns_dtype=_DTYPES[config.ns_dtype],
        lr_adjust=config.lr_adjust,
    )
    optimizer = Muon(matrices, mesh, settings)
    dtype = _state_dtype(matrices, config)
    for matrix in matrices:
        optimizer.state[matrix.local] = {"momentum_buffer": torch.zeros_like(matrix.local, dtype=dtype)}
    return [optimizer]


def _adafactor(parameters: Sequence[LocalParameter], config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    assert config.beta2_decay is not None and config.update_clip is not None
    groups = _groups(parameters, config.weight_decay)
    optimizer = Adafactor(groups, lr=config.lr, beta2_decay=config.beta2_decay, update_clip=config.update_clip)
    for parameter in parameters:
        optimizer.state[parameter.local] = {"step": _zero_steps(parameter), **adafactor.start_states(parameter)}
    return [optimizer]


def _groups(parameters: Sequence[LocalParameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns torch's parameter groups, each with its LocalParameters as well: matrices, which decay, and vectors."""
    matrices = [p for p in parameters if len(p.spec.shape) > 1]
    vectors = [p for p in parameters if len(p.spec.shape) <= 1]
    return [
        {"params": [p.local for p in some], "parameters": some, "weight_decay": decay}
        for some, decay in ((matrices, weight_decay), (vectors, 0.0))
        if some
    ]


def _state_dtype(parameters: Sequence[LocalParameter], config: OptimizerConfig) -> torch.dtype:
    return parameters[0].local.dtype if config.state_dtype is None else _DTYPES[config.state_dtype]


def _zero_steps(parameter: LocalParameter) -> Tensor:
    return torch.zeros((), device=parameter.local.device)

"""AdamW and SGD whose states have another dtype than the parameters. torch's own keep states as wide as the parameter;
these widen each state to float32, step with it, and round it to the nearest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _OneByOne(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by itself, so that its temporary tensors are gone before the next."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, group)

    def step_parameter(self, parameter: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError


class LowPrecisionAdamW(_OneByOne):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2). `state` must have "step", "exp_avg" and
    "exp_avg_sq" of each parameter before the first step."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def step_parameter(self, parameter: Any, group: dict[str, Any]) -> None:
        (beta1, beta2), lr, state = group["betas"], group["lr"], self.state[parameter]
        state["step"] += 1
        step = state["step"].item()
        gradient = parameter.grad.float()
        mean = wide(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        square = wide(state["exp_avg_sq"]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        denominator = square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        change = mean.div_(denominator).mul_(lr / (1 - beta1**step))
        apply(parameter, change, decay=lr * group["weight_decay"])


class LowPrecisionSGD(_OneByOne):
    """SGD with momentum as torch.optim.SGD has it: weight decay is added to the gradient. `state` must have
    "momentum_buffer" of each parameter before the first step."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0})

    def step_parameter(self, parameter: Any, group: dict[str, Any]) -> None:
        gradient = parameter.grad.float().add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]["momentum_buffer"]
        buffer = wide(state).mul_(group["momentum"]).add_(gradient)
        state.copy_(buffer)
        change = gradient.add_(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        apply(parameter, change.mul_(group["lr"]), decay=0.0)


def wide(x: Tensor) -> Tensor:
    """Returns a float32 copy, also of a float32 tensor: what is computed in its place must not be left in a state."""
    return x.to(torch.float32, copy=True)


def apply(parameter: Tensor, change: Tensor, *, decay: float) -> None:
    """Sets the parameter to parameter * (1 - decay) - change, rounded once."""
    if parameter.dtype == torch.float32:
        parameter.mul_(1 - decay).sub_(change)
    else:
        parameter.copy_(parameter.float().mul_(1 - decay).sub_(change))

"""AdamW and SGD whose states are of another dtype than the parameters: each is widened, stepped with in float32 and
rounded to the nearest again. torch's own optimizers keep their states as wide as the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2). `state` has "step", "exp_avg", "exp_avg_sq" of
    each parameter before the first step."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in with_gradient(group):
                self._step(parameter, group)

    def _step(self, parameter: Any, group: dict[str, Any]) -> None:
        """By itself, so that what it makes is gone before the next parameter's."""
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


class NarrowSGD(torch.optim.Optimizer):
    """SGD with momentum as torch.optim.SGD has it, its weight decay added to the gradient. `state` has
    "momentum_buffer" of each parameter before the first step."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in with_gradient(group):
                self._step(parameter, group)

    def _step(self, parameter: Any, group: dict[str, Any]) -> None:
        """By itself, so that what it makes is gone before the next parameter's."""
        gradient = parameter.grad.float().add(parameter, alpha=group["weight_decay"])
        narrow = self.state[parameter]["momentum_buffer"]
        buffer = wide(narrow).mul_(group["momentum"]).add_(gradient)
        narrow.copy_(buffer)
        change = gradient.add_(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        apply(parameter, change.mul_(group["lr"]), decay=0.0)


def with_gradient(group: dict[str, Any]) -> list[Any]:
    """A group's parameters that are to be stepped: as in torch, those that have a gradient."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def wide(x: Tensor) -> Tensor:
    """A float32 copy, whatever x is: what is computed in its place must not be left in a state."""
    return x.to(torch.float32, copy=True)


def apply(parameter: Tensor, change: Tensor, *, decay: float) -> None:
    """parameter * (1 - decay) - change, rounded once."""
    if parameter.dtype == torch.float32:
        parameter.mul_(1 - decay).sub_(change)
    else:
        parameter.copy_(parameter.float().mul_(1 - decay).sub_(change))

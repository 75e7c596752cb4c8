"""Optimizers whose states have a different dtype from the parameters, such as bfloat16.

A step computes in float32 and rounds parameters and states to nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.optimizers.rounds import runs


class _InFloat32(torch.optim.Optimizer):
    """Runs one of torch's optimizers in float32, for states whose dtype is not the parameter's.

    To limit temporary memory, it updates a few parameters at a time, together no larger than the
    largest one. `state` must be complete for each parameter before the first step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        largest = max(p.numel() for group in groups for p in group["params"])
        for group in groups:
            for some in runs(group["params"], Tensor.numel, most=largest):
                self._step_together(some, group)
        self.param_groups = groups

    def _step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        kept = [(p, p.data, p.grad, self.state[p]) for p in parameters]
        for p, value, gradient, state in kept:
            assert gradient is not None
            p.grad = None  # torch requires the gradient in the dtype of its parameter.
            p.data = value.float()
            p.grad = gradient.float()
            self.state[p] = {name: narrow.float() for name, narrow in state.items()}
        self.param_groups = [group | {"params": parameters}]
        super().step()
        for p, value, gradient, state in kept:
            value.copy_(p.data)  # No copy if both are the same tensor.
            for name, narrow in state.items():
                narrow.copy_(self.state[p][name])
            p.grad = None
            p.data = value
            p.grad = gradient
            self.state[p] = state


class LowPrecisionAdamW(_InFloat32, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with states of any dtype."""


class LowPrecisionSGD(_InFloat32, torch.optim.SGD):
    """SGD with a momentum buffer of any dtype."""

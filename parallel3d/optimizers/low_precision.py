"""Optimizers whose parameters or states have fewer bits than float32. A step widens them, steps in
float32, and rounds to the nearest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.optimizers.step_bytes import runs
from parallel3d.torch_private import foreach_copy_


class _InFloat32(torch.optim.Optimizer):
    """Lets torch's own optimizer, which keeps states as wide as the parameter, step with states of
    another dtype. A few parameters are stepped at a time, together no larger than the largest, so
    that few temporary tensors exist at once. `state` must have all states of each parameter before
    the first step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        largest = max((p.numel() for p in parameters), default=0)
        for group in groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            for some in runs(stepped, Tensor.numel, most=largest):
                self._step_together(some, group)
        self.param_groups = groups

    def _step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        kept = [p.data for p in parameters]
        for state in states:
            kept += state.values()
        wide = _in_float32(kept)
        stepped = iter(wide)
        for p, gradient in zip(parameters, _in_float32(gradients), strict=True):
            p.grad = None  # a gradient must have the dtype of its parameter
            p.data, p.grad = next(stepped), gradient
        for p, state in zip(parameters, states, strict=True):
            self.state[p] = {name: next(stepped) for name in state}
        self.param_groups = [group | {"params": parameters}]
        super().step()
        _copy_into(kept, wide)
        originals = zip(parameters, kept, gradients, states, strict=False)
        for p, value, gradient, state in originals:
            p.grad = None
            p.data, p.grad, self.state[p] = value, gradient, state


class LowPrecisionAdamW(_InFloat32, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with "exp_avg" and "exp_avg_sq" of any
    dtype."""


class LowPrecisionSGD(_InFloat32, torch.optim.SGD):
    """SGD with a "momentum_buffer" of any dtype."""


def _in_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies in float32 of the tensors of another dtype, and the others themselves."""
    wide = []
    for x in tensors:
        is_wide = x.dtype == torch.float32
        wide.append(x if is_wide else torch.empty_like(x, dtype=torch.float32))
    _copy_into(wide, tensors)
    return wide


def _copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, unless the two are the same tensor."""
    pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if a is not b]
    if pairs:
        foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def apply_update(parameter: Tensor, change: Tensor, *, decay: float) -> None:
    """Sets the parameter to parameter * (1 - decay) - change, rounded once."""
    wide = parameter.float()  # the parameter itself in float32, and a copy otherwise
    parameter.copy_(wide.mul_(1 - decay).sub_(change))

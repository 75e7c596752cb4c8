"""Steps of parameters or states that have fewer bits than float32: they are widened, stepped in float32, and rounded to
the nearest or stochastically.

[Note: stochastic rounding] The change of a weight in a step is often below half of bf16's spacing, which is 1/256 of
the weight, and rounding to the nearest would lose it step after step. A number that is rounded up with the probability
of what is cut off is kept on average (Gupta et al. 2015, arXiv 1502.02551). The noise of an element is a hash of (seed,
step, name of the parameter, place in the global tensor) and of nothing else: replicas draw the same and stay alike to
the bit, and no layout changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d.optimizers.step_bytes import WIDE_ELEMENTS, rounds, runs
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import foreach_copy_, offsets_of


class _InFloat32(torch.optim.Optimizer):
    """Lets torch's own optimizer, which keeps states as wide as the parameter, step with states of another dtype. Of
    the parameters that have a gradient a few are stepped at a time, together no larger than the largest, so that the
    temporary tensors of one run are gone before the next. `state` must have all states of each parameter before the
    first step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        stepped = [[p for p in group["params"] if p.grad is not None] for group in groups]
        largest = max((p.numel() for of_group in stepped for p in of_group), default=0)
        for group, of_group in zip(groups, stepped, strict=True):
            for some in runs(of_group, Tensor.numel, most=largest):
                self._step_together(some, group)
        self.param_groups = groups

    def _step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients, states = [p.grad for p in parameters if p.grad is not None], [self.state[p] for p in parameters]
        kept = [*(p.data for p in parameters), *(state for of_one in states for state in of_one.values())]
        stepped = _in_float32(kept)  # in place
        wide = iter(stepped)
        for p, value, gradient in zip(parameters, wide, _in_float32(gradients), strict=False):
            p.grad = None  # a gradient has its parameter's dtype
            p.data, p.grad = value, gradient
        for p, of_one in zip(parameters, states, strict=True):
            self.state[p] = dict(zip(of_one, wide, strict=False))
        self.param_groups = [group | {"params": parameters}]
        super().step()
        if changed := [(old, new) for old, new in zip(kept, stepped, strict=True) if old is not new]:
            foreach_copy_([old for old, _ in changed], [new for _, new in changed])
        for p, value, gradient, of_one in zip(parameters, kept, gradients, states, strict=False):
            p.grad = None
            p.data, p.grad, self.state[p] = value, gradient, of_one


class LowPrecisionAdamW(_InFloat32, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with "exp_avg" and "exp_avg_sq" of any dtype."""


class LowPrecisionSGD(_InFloat32, torch.optim.SGD):
    """SGD with a "momentum_buffer" of any dtype."""


def _in_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies in float32 of the tensors of another dtype, and the others themselves."""
    wide = [x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32) for x in tensors]
    narrow = [(copy, x) for copy, x in zip(wide, tensors, strict=True) if copy is not x]
    if narrow:
        foreach_copy_([copy for copy, _ in narrow], [x for _, x in narrow])
    return wide


def apply(parameter: Tensor, change: Tensor, *, decay: float) -> None:
    """Sets the parameter to parameter * (1 - decay) - change, rounded once."""
    wide = parameter.float()  # the parameter itself in float32, and a copy otherwise
    parameter.copy_(wide.mul_(1 - decay).sub_(change))


@torch.no_grad()
def step_in_float32(
    optimizer: torch.optim.Optimizer, parameters: Sequence[LocalParameter], *, seed: int, step: int
) -> None:
    """Does `optimizer.step()` for bf16 parameters in float32, and rounds the parameters and the bf16 states
    stochastically. A few parameters are widened at a time, which takes little memory. `parameters` are all that the
    optimizer has."""
    gradients = {parameter.local: parameter.local.grad for parameter in parameters}
    for local in gradients:
        local.grad = None  # an optimizer leaves out what has none
    for group in rounds(parameters, lambda parameter: math.prod(parameter.spec.shape), most=WIDE_ELEMENTS):
        narrow, widened = {}, {}
        for parameter in group:
            local, states = parameter.local, optimizer.state[parameter.local]
            narrow[local], local.grad = local.data, gradients.pop(local)
            widened[local] = _widen(local, states)
        optimizer.step()
        for parameter in group:
            local, states = parameter.local, optimizer.state[parameter.local]
            key = f"{seed}/{step}/{parameter.name}"
            for name in widened[local]:  # no variable keeps a wide one
                states[name] = round_stochastically(states[name], noise(parameter, f"{key}/{name}"))
            narrow[local].copy_(round_stochastically(local.data, noise(parameter, key)))
            local.data = narrow[local]
            local.grad = None


def _widen(parameter: nn.Parameter, states: dict[str, Tensor]) -> list[str]:
    """Makes a parameter, its gradient and its states float32; returns the names of the states that were not."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.float()
    parameter.grad = None if gradient is None else gradient.float()
    narrow = [name for name, state in states.items() if state.dtype != torch.float32]
    for name in narrow:  # no variable keeps a narrow one
        states[name] = states[name].float()
    return narrow


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, up or down to one of the two neighbours. `noise`, int32 of x's shape, is uniform from
    0 to 2^16 - 1. A number that bf16 can represent stays as it is."""
    noise.masked_fill_(x.isnan(), 0)  # a NaN would become a number
    return (x.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


def noise(parameter: LocalParameter, key: str) -> Tensor:
    """Returns this rank's part of a global tensor of noise: int32, uniform from 0 to 2^16 - 1, of the part's shape."""
    local = parameter.local.data
    tensor = parameter.distributed(local)
    offsets = offsets_of(tensor) if isinstance(tensor, DTensor) and local.numel() else [0] * local.ndim
    sums = torch.zeros((), dtype=torch.int32, device=local.device)
    for dim, (offset, size) in enumerate(zip(offsets, local.shape, strict=True)):
        digest = hashlib.blake2b(f"{key}/{dim}".encode(), digest_size=4).digest()
        places = torch.arange(offset, offset + size, dtype=torch.int32, device=local.device)
        along = _hash(places + int.from_bytes(digest, "big", signed=True))
        sums = sums + along.view(-1, *(1 for _ in local.shape[dim + 1 :]))
    return _hash(sums).bitwise_and_(0xFFFF)


def _hash(x: Tensor) -> Tensor:
    """Applies the finalizer of MurmurHash3 (Appleby, public domain), a bijection of the 32-bit numbers; `x` is
    overwritten. torch's int32 shifts copy the sign bit, which the masks take away."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))

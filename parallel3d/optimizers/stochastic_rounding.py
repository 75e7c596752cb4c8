"""Stochastic rounding to bfloat16. The change of a weight in a step is often below half of bf16's spacing, which is
1/256 of the weight, and rounding to the nearest would lose it step after step. A number that is rounded up with the
probability of what is cut off is kept on average (Gupta et al. 2015, arXiv 1502.02551).

The noise of an element is a hash of (seed, step, name of the parameter, place in the global tensor) and of nothing
else: replicas draw the same and stay alike to the bit, and no layout changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d.optimizers.assignment import WIDE_ELEMENTS, rounds
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.torch_private import offsets_of


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
            local = parameter.local
            narrow[local], gradient = local.data, gradients.pop(local)
            local.data = local.data.float()
            local.grad = None if gradient is None else gradient.float()
            widened[local] = _narrow_states(optimizer, local)
            for name in widened[local]:
                optimizer.state[local][name] = optimizer.state[local][name].float()
        optimizer.step()
        for parameter in group:
            local = parameter.local
            key = f"{seed}/{step}/{parameter.name}"
            states = optimizer.state[local]
            for name in widened[local]:  # no variable keeps a wide one
                states[name] = round_stochastically(states[name], noise(parameter, f"{key}/{name}"))
            narrow[local].copy_(round_stochastically(local.data, noise(parameter, key)))
            local.data = narrow[local]
            local.grad = None


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, up or down to one of the two neighbours. `noise`, int32 of x's shape, is uniform from
    0 to 2^16 - 1. A number that bf16 can represent stays as it is."""
    return (x.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


def noise(parameter: LocalParameter, key: str) -> Tensor:
    """Returns this rank's part of a global tensor of noise: int32, uniform from 0 to 2^16 - 1, of the part's shape."""
    local = parameter.local.data
    sums = torch.zeros((), dtype=torch.int32, device=local.device)
    for dim, (offset, size) in enumerate(zip(_offsets(parameter), local.shape, strict=True)):
        digest = hashlib.blake2b(f"{key}/{dim}".encode(), digest_size=4).digest()
        places = torch.arange(offset, offset + size, dtype=torch.int32, device=local.device)
        along = _hash(places + int.from_bytes(digest, "big", signed=True))
        sums = sums + along.view(-1, *(1 for _ in local.shape[dim + 1 :]))
    return _hash(sums).bitwise_and_(0xFFFF)


def _offsets(parameter: LocalParameter) -> list[int]:
    """Returns where this rank's part begins in the global tensor, for each dim."""
    tensor = parameter.distributed(parameter.local.data)
    if not isinstance(tensor, DTensor) or not parameter.local.numel():
        return [0] * parameter.local.ndim
    return list(offsets_of(tensor))


def _hash(x: Tensor) -> Tensor:
    """Applies the finalizer of MurmurHash3 (Appleby, public domain), a bijection of the 32-bit numbers; `x` is
    overwritten. torch's int32 shifts copy the sign bit, which the masks take away."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _narrow_states(optimizer: torch.optim.Optimizer, local: Tensor) -> list[str]:
    """Returns the names of the states in bf16; wider ones are stepped as they are."""
    return [name for name, state in optimizer.state[local].items() if state.dtype == torch.bfloat16]

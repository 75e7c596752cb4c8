"""Initial weights that do not depend on the layout.

Each parameter's global tensor is drawn on the CPU in float32 from a generator seeded by (seed, its global name), and
every rank keeps its part. So every layout, and every device, starts from the same model.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from parallel3d.layers.parameter import Initializer, ParameterSpec, named_specs


def normal(std: float) -> Initializer:
    """Normal with mean 0."""

    def fill(tensor: Tensor, generator: torch.Generator | None) -> object:
        return tensor.normal_(0.0, std, generator=generator)

    return fill


def ones(tensor: Tensor, generator: torch.Generator | None) -> object:
    """The start of a norm's scale."""
    return tensor.fill_(1.0)


def initial_tensor(spec: ParameterSpec, name: str, seed: int) -> Tensor:
    """The global tensor that the parameter of this global name starts from, float32 on the CPU."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    full = torch.empty(spec.shape, dtype=torch.float32)
    with torch.no_grad():
        spec.init(full, generator)
    return full


def initial_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Every parameter's initial global tensor by its global name; a tied one once, under its first name.

    `module` may be on the meta device. For references and tests: a run never holds more than one of them at a time.
    """
    return {name: initial_tensor(spec, name, seed) for name, spec in named_specs(module)}

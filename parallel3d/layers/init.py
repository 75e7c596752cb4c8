"""Initial weights that do not depend on the layout.

Each parameter's global tensor is drawn on the CPU in float32 from a generator seeded by (seed, its global name), and
every rank keeps its part. So every layout, and every device, starts from the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from parallel3d.layers.parameter import Initializer, ParallelModule, ParameterSpec, named_specs


def normal(std: float) -> Initializer:
    """Returns an initializer that draws from a normal distribution with mean 0."""

    def fill(tensor: Tensor, generator: torch.Generator | None) -> object:
        return tensor.normal_(0.0, std, generator=generator)

    return fill


def ones(tensor: Tensor, generator: torch.Generator | None) -> object:
    """Fills a norm's scale with ones."""
    return tensor.fill_(1.0)


def zeros(tensor: Tensor, generator: torch.Generator | None) -> object:
    """Fills a bias with zeros."""
    return tensor.zero_()


def uniform(bound: float) -> Initializer:
    """Returns an initializer that draws uniformly between -bound and bound."""

    def fill(tensor: Tensor, generator: torch.Generator | None) -> object:
        return tensor.uniform_(-bound, bound, generator=generator)

    return fill


def initial_tensor(spec: ParameterSpec, name: str, seed: int) -> Tensor:
    """Returns the global tensor that the parameter of this global name starts from, float32 on the CPU."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    full = torch.empty(spec.shape, dtype=torch.float32)
    with torch.no_grad():
        spec.init(full, generator)
    return full


def initial_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns the initial global tensor of every parameter by its global name; a tied one is there once, under its
    first name.

    `module` may be on the meta device. References and tests use it; a run holds one global tensor at a time.
    """
    return {name: initial_tensor(spec, name, seed) for name, spec in named_specs(module)}


def set_initializers(module: nn.Module, initializers: Mapping[str, Initializer]) -> None:
    """Replaces the initializers of the parameters whose global names match a pattern (`layers.*.mlp.down.weight`); the
    last match holds. It changes no value: call it before `initialize`. Raises ValueError for a pattern that matches
    nothing."""
    names = [name for name, _ in named_specs(module)]
    for pattern, init in initializers.items():
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"set_initializers: {pattern!r} matches none of {', '.join(names[:8])}, ...")
        for name in matches:
            owner, _, attribute = name.rpartition(".")
            part = module.get_submodule(owner)
            assert isinstance(part, ParallelModule)
            part.specs[attribute] = replace(part.specs[attribute], init=init)


def initialize(module: nn.Module, seed: int, device: torch.device | str) -> None:
    """Gives every parameter its initial values, on `device`, from the meta device or another: one global tensor at a
    time is drawn and cut, so that a model larger than the memory can be built. Tied parameters stay tied. Nothing is
    sent. Call it before `fully_shard`; a model that is already sharded is filled by `parallelize.fill`."""
    made: dict[int, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, ParallelModule):
            continue
        for attribute, spec in part.specs.items():
            old = part.get_parameter(attribute)
            if id(old) not in made:
                full = initial_tensor(spec, f"{prefix}.{attribute}" if prefix else attribute, seed)
                local = spec.local_part(full, part.axis).clone().to(device=device, dtype=old.dtype)
                made[id(old)] = nn.Parameter(part.on_axis(local, spec, full), requires_grad=old.requires_grad)
            setattr(part, attribute, made[id(old)])

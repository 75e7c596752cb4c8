"""Cutting a model into pipeline stages.

Any `nn.Sequential`, or list of a model's modules by name, is cut by `cut_sequential` and `cut_by_names`. The project's
own models are cut by `cut`, as what they are: they say which of their parts are their blocks (`layers`, a ModuleDict
whose keys are the blocks' indices in the whole model), which come before them (`embed`) and which after (`norm`,
`head`). A stage is the model itself without the parts of the others, so that every parameter keeps its global name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel3d.pipeline.boundary import Boundary, TensorSpec
from parallel3d.schedules.balance import cut_points

FIRST_PARTS = ("embed",)
LAST_PARTS = ("norm", "head")


@dataclass(frozen=True)
class Span:
    """The blocks first <= i < end of the whole model, and whether the embedding or the head go with them."""

    first: int
    end: int
    is_first_stage: bool
    is_last_stage: bool


def spans_of(sizes: Sequence[int]) -> list[Span]:
    """The stages that have so many blocks each (`balance`)."""
    starts = (0, *cut_points(sizes))
    last = len(sizes) - 1
    return [
        Span(start, start + size, is_first_stage=stage == 0, is_last_stage=stage == last)
        for stage, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def cut(model: nn.Module, span: Span) -> nn.Module:
    """Takes out of `model` (changed in place) what is not of this stage, and returns it."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)
    for index in list(layers):
        if not span.first <= int(index) < span.end:
            del layers[index]
    gone = ([] if span.is_first_stage else list(FIRST_PARTS)) + ([] if span.is_last_stage else list(LAST_PARTS))
    for name in gone:
        setattr(model, name, None)
    return model


def names_of(span: Span, names: Iterable[str]) -> set[str]:
    """Those of the model's parameter names that belong to a stage."""
    blocks = {str(index) for index in range(span.first, span.end)}
    parts = {*(FIRST_PARTS if span.is_first_stage else ()), *(LAST_PARTS if span.is_last_stage else ())}
    return {
        name
        for name in names
        if name.split(".")[0] in parts or (name.startswith("layers.") and name.split(".")[1] in blocks)
    }


def check_nothing_lost(names: set[str], spans: list[Span]) -> None:
    """Raises ValueError where a parameter of the model would be on no stage, or on two."""
    kept = [name for span in spans for name in names_of(span, names)]
    if sorted(kept) != sorted(names):
        lost, doubled = sorted(names - set(kept)), sorted({name for name in kept if kept.count(name) > 1})
        raise ValueError(f"the stages lose {lost[:4]} and have twice {doubled[:4]} of the model's parameters")


def cut_sequential(model: nn.Sequential, boundaries: Sequence[int]) -> list[nn.Sequential]:
    """The stages of a Sequential; `boundaries` are the first modules of each stage but the first. The modules are the
    model's own, under their own names, so that the stages' state dicts together are the model's.

    Raises ValueError where a stage would be empty.
    """
    return cut_by_names(model, [name for name, _ in model.named_children()], boundaries)


def cut_by_names(model: nn.Module, names: Sequence[str], boundaries: Sequence[int]) -> list[nn.Sequential]:
    """As `cut_sequential` for the modules of any model that are called one after the other in its forward, such as
    ["embed", "blocks.0", "blocks.1", "norm", "head"]. Each takes what the one before gives, one tensor or a tuple.

    Raises ValueError also where a parameter of the model is in none of them, or in two.
    """
    ends = [*boundaries, len(names)]
    starts = [0, *boundaries]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise ValueError(f"boundaries {list(boundaries)}: leave a stage empty of the {len(names)} modules")
    held = [f"{name}.{inner}" for name in names for inner, _ in model.get_submodule(name).named_parameters()]
    missing = sorted({name for name, _ in model.named_parameters(remove_duplicate=False)} - set(held))
    doubled = sorted({name for name in held if held.count(name) > 1})
    if missing or doubled:
        raise ValueError(f"the modules {list(names)} leave out {missing[:4]} and have twice {doubled[:4]}")
    return [Chain(model, names[start:end]) for start, end in zip(starts, ends, strict=True)]


class Chain(nn.Sequential):
    """Modules of a model one after the other, under the names that they have in it."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in names:
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(leaf, model.get_submodule(name))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values: Tensor | tuple[Tensor, ...] = inputs
        for name in self.names:
            module = self.get_submodule(name)
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values


@torch.no_grad()
def boundaries_of(stages: Sequence[nn.Module], *example: Tensor) -> list[Boundary]:
    """What crosses between stages that are all here, from a forward of an example microbatch: on the meta device it
    costs nothing. Tensors of floating point are taken to need a gradient."""
    values: tuple[Tensor, ...] = example
    boundaries = []
    for stage in stages[:-1]:
        made = stage(*values)
        values = (made,) if isinstance(made, Tensor) else tuple(made)
        boundaries.append(tuple(TensorSpec(tuple(value.shape), value.dtype) for value in values))
    return boundaries

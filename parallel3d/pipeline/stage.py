"""Cutting a model into pipeline stages. A parameter of a stage keeps the name that it has in the
whole model.

`cut` removes the other stages' parts from the project's own models, whose attributes are the blocks
(`layers`, a ModuleDict keyed by the block's index in the whole model) and what comes before
(`embed`) and after (`norm`, `head`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, nn

from parallel3d.errors import ConfigError

FIRST_PARTS = ("embed",)
LAST_PARTS = ("norm", "head")


@dataclass(frozen=True)
class BlockRange:
    """The blocks first <= i < end of the whole model, and whether the embedding or the head go with
    them."""

    first: int
    end: int
    is_first_stage: bool
    is_last_stage: bool

    @property
    def parts(self) -> set[str]:
        """The names of the model's parts, beside its blocks, that go with them."""
        parts: set[str] = set()
        if self.is_first_stage:
            parts.update(FIRST_PARTS)
        if self.is_last_stage:
            parts.update(LAST_PARTS)
        return parts


def block_ranges(sizes: Sequence[int]) -> list[BlockRange]:
    """Returns the blocks of each stage, from how many blocks each stage has
    (`schedules.balance`)."""
    last = len(sizes) - 1
    return [
        BlockRange(first, end, is_first_stage=stage == 0, is_last_stage=stage == last)
        for stage, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]


def cut(model: nn.Module, blocks: BlockRange) -> nn.Module:
    """Removes from `model`, in place, the parts that belong to other stages, and returns it."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)
    for index in list(layers):
        if not blocks.first <= int(index) < blocks.end:
            del layers[index]
    for name in {*FIRST_PARTS, *LAST_PARTS} - blocks.parts:
        setattr(model, name, None)
    return model


def names_of(blocks: BlockRange, names: Iterable[str]) -> set[str]:
    """Returns the model's parameter names that belong to a stage."""
    prefixes = [f"{part}." for part in blocks.parts]
    prefixes += [f"layers.{index}." for index in range(blocks.first, blocks.end)]
    return {name for name in names if name.startswith(tuple(prefixes))}


def check_nothing_lost(names: set[str], ranges: list[BlockRange]) -> None:
    """Raises ValueError if a parameter of the model would be on no stage."""
    lost = names.difference(*(names_of(blocks, names) for blocks in ranges))
    if lost:
        raise ValueError(f"the stages leave out {sorted(lost)[:4]} of the model's parameters")


def shared_by_ends(aliases: Mapping[str, str], ranges: Sequence[BlockRange]) -> set[str]:
    """Returns the first name of each parameter that the first and the last stage share. `aliases`
    maps the later names of a shared parameter to its first name. Raises ConfigError if any other
    stages share a parameter, because only these two sum their gradients."""
    shared = set()
    for name, first in aliases.items():
        both = (first, name)
        stages = [stage for stage, blocks in enumerate(ranges) if names_of(blocks, both)]
        if stages == [0, len(ranges) - 1]:
            shared.add(first)
        elif len(stages) > 1:
            raise ConfigError(
                f"parallel.pp * parallel.virtual_stages = {len(ranges)}: {first} and {name} "
                f"are one parameter on the stages {' and '.join(map(str, stages))}; only the first "
                "and the last stage can share one; set parallel.pp=1, or parallel.stage_boundaries "
                "that keep these modules on one stage"
            )
    return shared


def cut_sequential(model: nn.Sequential, boundaries: Sequence[int]) -> list[nn.Sequential]:
    """Cuts a Sequential into its stages. `boundaries` are the indices of the first module of each
    stage but the first. Raises ValueError where a stage would be empty.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        >>> stages = parallel3d.cut_sequential(model, [2])
        >>> [name for name, _ in stages[1].named_parameters()]
        ['2.weight', '2.bias']
    """
    return cut_by_names(model, [name for name, _ in model.named_children()], boundaries)


def cut_by_names(
    model: nn.Module, names: Sequence[str], boundaries: Sequence[int]
) -> list[nn.Sequential]:
    """Cuts a model into stages if its forward calls the modules `names` one after the other, such
    as ["embed", "blocks.0", "blocks.1", "norm", "head"]. Each module takes what the one before
    gives, one tensor or a tuple. Raises ValueError if a stage would be empty, or a parameter of the
    model is on no stage or on two.

    Example:
        >>> names = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
        >>> stages = parallel3d.cut_by_names(model, names, [2])
        >>> len(stages)  # embed and block 0; blocks 1 and 2, and the head
        2
    """
    stages: list[nn.Sequential] = [Chain(model, own) for own in names_by_stage(names, boundaries)]
    held: dict[nn.Parameter, str] = {}
    for stage in stages:
        own = {parameter: name for name, parameter in stage.named_parameters()}
        for parameter in own.keys() & held.keys():
            raise ValueError(
                f"{own[parameter]} and {held[parameter]} are one parameter on two stages, where "
                "each copy would learn something else; keep their modules on one stage, or give "
                "each its own parameter"
            )
        held |= own
    lost = [name for name, parameter in model.named_parameters() if parameter not in held]
    if lost:
        raise ValueError(f"the stages leave out {lost[:4]} of the model's parameters")
    return stages


def names_by_stage(names: Sequence[str], boundaries: Sequence[int]) -> list[Sequence[str]]:
    """Returns the names of each stage's modules. `boundaries` are the indices of the first name of
    each stage except the first. Raises ValueError if a stage would be empty."""
    ranges = [range(*ends) for ends in pairwise((0, *boundaries, len(names)))]
    if not all(ranges):
        raise ValueError(
            f"boundaries {list(boundaries)}: leave a stage empty of the {len(names)} modules"
        )
    return [names[own.start : own.stop] for own in ranges]


class Chain(nn.Sequential):
    """Calls modules of a model one after the other and keeps the names that they have in the
    model."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in names:
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(leaf, model.get_submodule(name))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values: Tensor | tuple[Tensor, ...] = inputs
        for name in self.names:
            module = self.get_submodule(name)
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values

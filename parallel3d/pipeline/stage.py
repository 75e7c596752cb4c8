"""Splits a model into pipeline stages. Parameters keep the names that they have in the full model.

`cut` works on the models of parallel3d. Their blocks are `layers`, a ModuleDict keyed by the index
in the full model. `embed` comes before them, `norm` and `head` come after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class SplitSpec:
    """Module names that tell `split_model` how to split a model into stages.

    Args:
        blocks: Name of the list of blocks.
        first: Modules of the first stage. On later stages each returns its input.
        last: Modules of the last stage, in the order of the forward pass. On earlier stages each
            returns its input.
        added: Modules of the first stage whose output is added to an embedding, such as learned
            positions. On later stages each returns 0.
        hidden: Keyword through which `forward` takes hidden states. None: they replace the token
            ids.
        settings: Keyword arguments of every call of `forward`.
        tuples: True if a block returns a tuple that starts with the hidden states.
        sequence_parts: Number of tp ranks that each have a part of the sequence between blocks.
        positions: Keyword of `forward` for the position of each token in its document.

    Example:
        >>> rules = parallel3d.SplitSpec("blocks", first=("embed",), last=("norm", "head"))
        >>> stages = parallel3d.split_model(model, [4, 8, 12], rules, example=ids)
    """

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    added: tuple[str, ...] = ()
    hidden: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    tuples: bool = False
    sequence_parts: int = 1
    positions: str | None = None


# Module names in parallel3d's own models, and in user-defined models with the same parts.
OWN_NAMES = SplitSpec("layers", first=("embed",), last=("norm", "head"))


def names_in(model: nn.Module) -> SplitSpec:
    """Returns the names by which a model is split into stages."""
    names: SplitSpec = getattr(model, "split_spec", OWN_NAMES)
    return names


@dataclass(frozen=True)
class BlockRange:
    """Part of a model in one stage: blocks first <= i < end, and perhaps the embedding or head."""

    first: int
    end: int
    is_first_stage: bool
    is_last_stage: bool

    def parts(self, spec: SplitSpec) -> list[str]:
        """Returns the names of the modules other than blocks that belong to this stage."""
        first = (*spec.first, *spec.added) if self.is_first_stage else ()
        return [*first, *(spec.last if self.is_last_stage else ())]


def block_ranges(sizes: Sequence[int]) -> list[BlockRange]:
    """Returns the block range of each stage.

    `sizes` holds the number of blocks per stage, as `schedules.blocks_per_stage` computes them.
    """
    last = len(sizes) - 1
    return [
        BlockRange(first, end, is_first_stage=stage == 0, is_last_stage=stage == last)
        for stage, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]


def cut(model: nn.Module, blocks: BlockRange) -> nn.Module:
    """Removes the modules of other stages from `model`, in place, and returns it."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)
    for index in list(layers):
        if not blocks.first <= int(index) < blocks.end:
            del layers[index]
    for name in {*OWN_NAMES.first, *OWN_NAMES.last}.difference(blocks.parts(OWN_NAMES)):
        setattr(model, name, None)
    return model


def names_of(blocks: BlockRange, names: Iterable[str], spec: SplitSpec) -> set[str]:
    """Returns the parameter names that belong to a stage."""
    prefixes = [f"{part}." for part in blocks.parts(spec)]
    prefixes += [f"{spec.blocks}.{index}." for index in range(blocks.first, blocks.end)]
    return {name for name in names if name.startswith(tuple(prefixes))}


def check_nothing_lost(names: set[str], ranges: list[BlockRange], spec: SplitSpec) -> None:
    """Raises ValueError if a parameter belongs to no stage."""
    lost = names.difference(*(names_of(blocks, names, spec) for blocks in ranges))
    if lost:
        raise ValueError(
            f"no stage holds the parameters {', '.join(sorted(lost)[:4])}; add their modules to "
            "first, added or last"
        )


def shared_by_ends(
    aliases: Mapping[str, str], ranges: Sequence[BlockRange], spec: SplitSpec
) -> set[str]:
    """Returns the canonical names of parameters that the first and the last stage share.

    `aliases` maps each further name of a tied parameter to its canonical one. Raises ConfigError if
    other stages share a parameter, because only these two sum their gradients.
    """
    shared = set()
    for name, first in aliases.items():
        both = (first, name)
        stages = [stage for stage, blocks in enumerate(ranges) if names_of(blocks, both, spec)]
        if stages == [0, len(ranges) - 1]:
            shared.add(first)
        elif len(stages) > 1:
            raise ConfigError(
                f"parallel.pp * parallel.virtual_stages = {len(ranges)}: {first} and {name} "
                f"are tied but on stages {' and '.join(map(str, stages))}; only the first "
                "and the last stage can share one; set parallel.pp=1, or parallel.stage_boundaries "
                "that keep these modules on one stage"
            )
    return shared


def cut_sequential(model: nn.Sequential, boundaries: Sequence[int]) -> list[nn.Sequential]:
    """Splits a Sequential into pipeline stages.

    Args:
        model: Model to cut. Its parameters keep their names.
        boundaries: Index of the first module of each stage except the first.

    Returns:
        One Sequential per stage.

    Raises:
        ValueError: A stage would be empty, or two stages share a parameter.

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
    """Splits a model whose forward calls its modules one after the other.

    Args:
        model: Model to cut. Its parameters keep their names.
        names: Modules in the order of the forward pass, for example `["embed", "blocks.0",
            "head"]`. Each takes the output of the previous one, a tensor or a tuple.
        boundaries: Index in `names` of the first module of each stage except the first.

    Returns:
        One module per stage.

    Raises:
        ValueError: A stage would be empty, or a parameter is on no stage or on two.

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
                f"{own[parameter]} and {held[parameter]} are tied but on two stages, so "
                "the copies would diverge; keep their modules on one stage, or give "
                "each its own parameter"
            )
        held |= own
    lost = [name for name, parameter in model.named_parameters() if parameter not in held]
    if lost:
        raise ValueError(f"no stage holds the parameters {lost[:4]}; add their modules to names")
    return stages


def names_by_stage(names: Sequence[str], boundaries: Sequence[int]) -> list[Sequence[str]]:
    """Returns the module names of each stage. Raises ValueError if a stage would be empty.

    `boundaries` are the indices of the first name of each stage except the first.
    """
    ranges = [range(*ends) for ends in pairwise((0, *boundaries, len(names)))]
    if not all(ranges):
        raise ValueError(
            f"boundaries = {list(boundaries)}: a stage would have none of the {len(names)} modules"
        )
    return [names[own.start : own.stop] for own in ranges]


class Chain(nn.Sequential):
    """Calls modules of a model one after the other. They keep the names that they have in it."""

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

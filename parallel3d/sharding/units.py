"""Communication units: modules whose parameters or gradients are communicated together.

A unit is usually a transformer block. Parameters outside of all units form the first unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.layers.experts import ExpertWeights
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from parallel3d.layers.weight_gradients import local_tensor

_LISTS = nn.ModuleList | nn.ModuleDict  # These classes have no forward pass to hook.
_LOOKED_UP = VocabParallelEmbedding | LearnedPositions | nn.Embedding
Wrap = Sequence[str | tuple[str, ...]] | None


@dataclass(frozen=True)
class CommunicationUnit:
    """Modules whose parameters are communicated together.

    It has one module, or several that share a parameter or a tuple of `wrap`. The unit of all
    remaining parameters has no modules.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """Number of elements in this tp rank's shards."""
        return sum(local_tensor(parameter.detach()).numel() for parameter in self.parameters)

    @property
    def has_head(self) -> bool:
        """True if the unit has a head, which `head_cross_entropy` reads after the forward pass."""
        return any(isinstance(part, VocabParallelHead) for part in self._parts())

    @property
    def is_looked_up(self) -> bool:
        """True if all parameters are embedding tables, whose values no backward pass reads."""
        holders = [part for part in self._parts() if [*part.parameters(recurse=False)]]
        return all(isinstance(part, _LOOKED_UP) for part in holders)

    @property
    def has_experts(self) -> bool:
        """True if the unit is the experts of a layer, which have a mesh of their own."""
        return all(isinstance(part, ExpertWeights) for part in self.modules) and bool(self.modules)

    def _parts(self) -> Iterator[nn.Module]:
        return nn.ModuleList(self.modules).modules()


def units_of(model: nn.Module, wrap: Wrap = None) -> list[CommunicationUnit]:
    """Returns the units in model order, after the unit of all remaining parameters.

    A parameter shared by two units joins them. If it is also used outside of all units, its unit
    joins that of the remaining parameters.

    Args:
        model: Model to divide.
        wrap: Name patterns of the modules that are units. In "layers.*", the * stands for one name
            between dots. A tuple of patterns is one unit. None means the blocks: every part of a
            Sequential, or every module of the outermost ModuleLists and ModuleDicts.

    Raises:
        ValueError: A pattern matches nothing.
    """
    number = _numbered(model, _block_patterns(model) if wrap is None else wrap)
    holders: dict[nn.Parameter, set[int]] = {}  # Units that use a parameter.

    def visit(module: nn.Module, around: int) -> None:
        unit = number.get(module, around)
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, 0)
    # Union-find parent: joined units map to the smallest index.
    joined = {index: index for index in (0, *number.values())}
    for users in holders.values():
        found = {joined[index] for index in users}
        for index, own in joined.items():
            if own in found:
                joined[index] = min(found)
    parameters = defaultdict(list)
    modules = defaultdict(list)
    for parameter, users in holders.items():
        parameters[joined[min(users)]].append(parameter)
    for module in model.modules():
        unit = joined[number.get(module, 0)]
        if unit > 0:
            modules[unit].append(module)
    units = []
    for index in sorted(parameters):
        units.append(CommunicationUnit(tuple(modules[index]), tuple(parameters[index])))
    return units


def _block_patterns(model: nn.Module) -> list[str]:
    """Returns patterns for the parts of a Sequential, or for the modules in the outermost lists."""
    if isinstance(model, nn.Sequential):
        return [*getattr(model, "names", ["*"])]  # The parts of a Chain may be nested deeper.
    lists: list[str] = []
    for name, part in model.named_modules():
        is_list = isinstance(part, _LISTS) and len(part) > 0
        if name and is_list and not name.startswith(tuple(lists)):
            lists.append(f"{name}.")
    return [f"{name}*" for name in lists]


def _numbered(model: nn.Module, wrap: Sequence[str | tuple[str, ...]]) -> dict[nn.Module, int]:
    """Maps modules matched by `wrap` to the number of their unit.

    The number is the position of the unit's first module in the model.
    """
    places = {module: place for place, module in enumerate(model.modules())}
    number: dict[nn.Module, int] = {}
    for each in wrap:
        together: list[nn.Module] = []
        for pattern in (each,) if isinstance(each, str) else each:
            found = [part for name, part in model.named_modules() if _matches(name, pattern)]
            if not found:
                children = ", ".join(name for name, _ in model.named_children()) or "none"
                raise ValueError(
                    f"wrap = {pattern}: matches no module; the model has the children {children}"
                )
            together += found
        first = min(places[part] for part in together)
        for part in together:
            number[part] = places[part] if isinstance(each, str) else first
    return number


def _matches(name: str, pattern: str) -> bool:
    is_as_deep = name.count(".") == pattern.count(".")
    return name != "" and is_as_deep and fnmatchcase(name, pattern)

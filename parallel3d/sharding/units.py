"""What of a model is gathered, or reduced, in one go: a unit is a block, say; what no unit holds is
the first one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

_LISTS = nn.ModuleList | nn.ModuleDict  # which have no forward to hook
_LOOKED_UP = VocabParallelEmbedding | LearnedPositions | nn.Embedding
Wrap = Sequence[str | tuple[str, ...]] | None


@dataclass(frozen=True)
class CommunicationUnit:
    """Modules whose parameters travel together: one, or several that share a parameter. The unit of
    what no other unit holds has no modules."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """The elements of this tp rank's parts."""
        return sum(local_tensor(parameter.detach()).numel() for parameter in self.parameters)

    @property
    def has_head(self) -> bool:
        """Whether a loss may multiply by a weight of the unit after the unit's forward
        (`head_cross_entropy`)."""
        return any(isinstance(part, VocabParallelHead) for part in self._parts())

    @property
    def is_looked_up(self) -> bool:
        """Whether all parameters are tables, whose rows are looked up: no backward reads their
        values."""
        holders = [part for part in self._parts() if [*part.parameters(recurse=False)]]
        return all(isinstance(part, _LOOKED_UP) for part in holders)

    def _parts(self) -> Iterator[nn.Module]:
        return nn.ModuleList(self.modules).modules()


def units_of(model: nn.Module, wrap: Wrap = None) -> list[CommunicationUnit]:
    """Returns the units in the order of the model, after the unit of what no other holds.

    `wrap` says which modules are units: patterns of their names ("layers.*", in which a * stands
    for one name between dots), and tuples of patterns for modules that are one unit together. None
    means the blocks: every part of a Sequential, or every module of the outermost ModuleLists and
    ModuleDicts.

    A parameter that two units share makes one unit of both, and one that is used outside of all
    units adds its unit to that of the rest. Raises ValueError if a pattern matches nothing.
    """
    number = _numbered(model, _block_patterns(model) if wrap is None else wrap)
    holders: dict[nn.Parameter, set[int]] = {}  # the units in which a parameter is used

    def visit(module: nn.Module, around: int) -> None:
        unit = number.get(module, around)
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, 0)  # the unit of the rest
    joined = {index: index for index in (0, *number.values())}  # units that share a parameter
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
    """Returns patterns of the parts of a Sequential, or of the modules in the outermost lists."""
    if isinstance(model, nn.Sequential):
        return [*getattr(model, "names", ["*"])]  # a Chain's parts may be deeper
    lists: list[str] = []
    for name, part in model.named_modules():
        is_list = isinstance(part, _LISTS) and len(part) > 0
        if name and is_list and not name.startswith(tuple(lists)):
            lists.append(f"{name}.")
    return [f"{name}*" for name in lists]


def _numbered(model: nn.Module, wrap: Sequence[str | tuple[str, ...]]) -> dict[nn.Module, int]:
    """Returns the modules that `wrap` names with the number of their unit, which is the place in
    the model of its first module."""
    places = {module: place for place, module in enumerate(model.modules())}
    number: dict[nn.Module, int] = {}
    for each in wrap:
        together: list[nn.Module] = []
        for pattern in (each,) if isinstance(each, str) else each:
            found = [part for name, part in model.named_modules() if _matches(name, pattern)]
            if not found:
                children = ", ".join(name for name, _ in model.named_children()) or "none"
                raise ValueError(f"wrap: {pattern} matches no module; its children are {children}")
            together += found
        first = min(places[part] for part in together)
        for part in together:
            number[part] = places[part] if isinstance(each, str) else first
    return number


def _matches(name: str, pattern: str) -> bool:
    is_as_deep = name.count(".") == pattern.count(".")
    return name != "" and is_as_deep and fnmatchcase(name, pattern)

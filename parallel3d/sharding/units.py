"""What of a model is gathered, or reduced, in one go: a unit is a block, say; what no unit holds is
the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from torch import nn

from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

_LISTS = nn.ModuleList | nn.ModuleDict  # which have no forward to hook
_LOOKED_UP = VocabParallelEmbedding | LearnedPositions | nn.Embedding
Wrap = Sequence[str | tuple[str, ...]] | None


@dataclass(frozen=True)
class ParameterUse:
    """A place in a module that holds a parameter; a shared parameter has several."""

    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter(self.attribute)


Uses = tuple[ParameterUse, ...]  # all uses of one parameter


@dataclass(frozen=True)
class CommunicationUnit:
    """Modules whose parameters travel together: one, or several that share a parameter. The unit of
    what no other unit holds has no modules."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[Uses, ...]

    @property
    def numel(self) -> int:
        """The elements of this tp rank's parts."""
        return sum(local_tensor(uses[0].parameter.detach()).numel() for uses in self.parameters)

    @property
    def has_head(self) -> bool:
        """Whether a loss may multiply by a weight of the unit after the unit's forward
        (`head_cross_entropy`)."""
        parts = chain.from_iterable(module.modules() for module in self.modules)
        return any(isinstance(part, VocabParallelHead) for part in parts)

    @property
    def is_looked_up(self) -> bool:
        """Whether all parameters are tables, whose rows are looked up: no backward reads their
        values."""
        return all(isinstance(use.module, _LOOKED_UP) for uses in self.parameters for use in uses)


def units_of(model: nn.Module, wrap: Wrap = None) -> list[CommunicationUnit]:
    """Returns the units in the order of the model, after the unit of what no other holds.

    `wrap` says which modules are units: patterns of their names ("layers.*", in which a * stands
    for one name between dots), and tuples of patterns for modules that are one unit together. None
    means the blocks: every module of the outermost ModuleLists and ModuleDicts.

    A parameter that two units share makes one unit of both, and one that is used outside of all
    units adds its unit to that of the rest. Raises ValueError if a pattern matches nothing.
    """
    number = _numbered(model, _block_names(model) if wrap is None else wrap)
    uses: dict[nn.Parameter, dict[ParameterUse, None]] = {}
    holders: dict[nn.Parameter, set[int]] = {}  # the units in which a parameter is used
    innermost: dict[str, int] = {}  # the unit around each place of the model; 0 is the rest
    for place, module in model.named_modules(remove_duplicate=False):  # blocks may share a module
        around = innermost.get(place.rpartition(".")[0], 0)
        innermost[place] = number.get(module, around)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(parameter, {})[ParameterUse(module, attribute)] = None
            holders.setdefault(parameter, set()).add(innermost[place])
    first = {index: index for index in (0, *number.values())}  # units that are joined
    for joined in holders.values():
        found = {first[index] for index in joined}
        first |= {index: min(found) for index, own in first.items() if own in found}
    modules: dict[int, list[nn.Module]] = {index: [] for index in first}
    for module, index in number.items():
        modules[first[index]].append(module)
    modules[0] = []
    held: dict[int, list[Uses]] = {}
    for parameter, places in uses.items():
        held.setdefault(first[min(holders[parameter])], []).append(tuple(places))
    return [CommunicationUnit(tuple(modules[index]), tuple(held[index])) for index in sorted(held)]


def _block_names(model: nn.Module) -> list[str]:
    """Returns the names of the modules in the outermost lists."""
    lists: list[str] = []
    names: list[str] = []
    for name, part in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in lists)
        if name and isinstance(part, _LISTS) and not is_inside:
            lists.append(name)
            names += [f"{name}.{inner}" for inner, _ in part.named_children()]
    return names


def _numbered(model: nn.Module, wrap: Sequence[str | tuple[str, ...]]) -> dict[nn.Module, int]:
    """Returns the modules that `wrap` names with the number of their unit, in the order of the
    model."""
    number: dict[nn.Module, int] = {}
    missing: set[str] = set()
    for each in wrap:
        patterns = (each,) if isinstance(each, str) else each
        missing |= {*patterns}
        first = 0  # the place of a tuple's first module in the model
        for at, (name, module) in enumerate(model.named_modules()):
            hits = [pattern for pattern in patterns if at and _matches(name, pattern)]
            if hits:
                missing -= {*hits}
                first = first or at
                number[module] = at if isinstance(each, str) else first
    if missing:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ValueError(
            f"wrap: {', '.join(sorted(missing))} matches no module; its children are {children}"
        )
    return {module: number[module] for module in model.modules() if module in number}


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")

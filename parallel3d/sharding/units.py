"""What of a model is gathered, or reduced, in one go: a unit is a block, say; what no unit holds is
the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

_LISTS = nn.ModuleList | nn.ModuleDict  # which have no forward to hook
_LOOKED_UP = VocabParallelEmbedding | LearnedPositions | nn.Embedding
_Choice = Sequence[str | tuple[str, ...]] | Callable[[str, nn.Module], bool]
Wrap = _Choice | None


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
        return any(
            isinstance(part, VocabParallelHead)
            for module in self.modules
            for part in module.modules()
        )

    @property
    def is_looked_up(self) -> bool:
        """Whether all parameters are tables, whose rows are looked up: no backward reads their
        values."""
        return all(isinstance(use.module, _LOOKED_UP) for uses in self.parameters for use in uses)


def units_of(model: nn.Module, wrap: Wrap = None) -> list[CommunicationUnit]:
    """Returns the units in the order of the model, after the unit of what no other holds.

    `wrap` says which modules are units: patterns of their names ("layers.*", in which a * stands
    for one name between dots), tuples of patterns for modules that are one unit together, or a
    predicate of name and module. None means the blocks: every module of the outermost ModuleLists
    and ModuleDicts.

    A parameter that two units share makes one unit of both; one that is used outside of all units
    too leaves its unit. Raises ValueError if a pattern matches nothing.
    """
    wrap = _block_names(model) if wrap is None else wrap
    chosen = _chosen(model, wrap)
    joined: list[set[int]] = []
    if not callable(wrap):
        tuples = [each for each in wrap if isinstance(each, tuple)]
        joined = [{chosen.index(module) for module in _chosen(model, each)} for each in tuples]
    uses, holders = _uses(model, chosen)
    first = _merged(len(chosen), [*joined, *holders.values()])
    units: dict[int, tuple[list[nn.Module], list[Uses]]] = {-1: ([], [])}
    for index, module in enumerate(chosen):
        if first[index] != -1:
            units.setdefault(first[index], ([], []))[0].append(module)
    for key, places in uses.items():
        units[first[min(holders[key])]][1].append(tuple(places))
    return [CommunicationUnit(tuple(found), tuple(held)) for found, held in units.values() if held]


def _uses(
    model: nn.Module, chosen: Sequence[nn.Module]
) -> tuple[dict[int, list[ParameterUse]], dict[int, set[int]]]:
    """Returns all uses of each parameter by its id, and the chosen modules that hold it. -1 stands
    for the model outside of them."""
    index_of = {id(module): index for index, module in enumerate(chosen)}
    innermost: dict[str, int] = {}  # the chosen module around each place of the model
    uses: dict[int, list[ParameterUse]] = {}
    holders: dict[int, set[int]] = {}
    for place, module in model.named_modules(remove_duplicate=False):  # blocks may share a module
        around = innermost.get(place.rpartition(".")[0], -1)
        innermost[place] = index_of.get(id(module), around)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            use, others = ParameterUse(module, attribute), uses.setdefault(id(parameter), [])
            if use not in others:
                others.append(use)
            holders.setdefault(id(parameter), set()).add(innermost[place])
    return uses, holders


def _merged(count: int, groups: Iterable[set[int]]) -> dict[int, int]:
    """Maps -1 and each of `count` numbers to the first number that goes with it, if the numbers of
    each group go together."""
    first = {index: index for index in range(-1, count)}
    for group in groups:
        found = {first[index] for index in group}
        first |= {index: min(found) for index, own in first.items() if own in found}
    return first


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


def _chosen(model: nn.Module, wrap: _Choice) -> list[nn.Module]:
    """Returns the modules that `wrap` means in the order of the model, an outer module before those
    in it."""
    if callable(wrap):
        named = [(name, module) for name, module in model.named_modules() if name]
        return [module for name, module in named if wrap(name, module)]
    patterns: list[str] = []
    for each in wrap:
        patterns += [each] if isinstance(each, str) else each
    chosen, matched = [], set()
    for name, module in model.named_modules():
        hits = {each for each in patterns if name and _matches(name, each)}
        matched |= hits
        if hits:
            chosen.append(module)
    missing = [pattern for pattern in patterns if pattern not in matched]
    if missing:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ValueError(
            f"wrap: {', '.join(missing)} matches no module; its children are {children}"
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")

"""What of a model is gathered, or reduced, in one go: a unit is a block, and what no block holds is the last unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.layers.parameter import local_tensor

Predicate = Callable[[str, nn.Module], bool]
Wrap = Sequence[str] | Predicate | int | None


@dataclass(frozen=True)
class ParameterUse:
    """A place in a module that holds a parameter."""

    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.module, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter


@dataclass(frozen=True)
class CommunicationUnit:
    """Modules whose parameters travel together: one, or several that share a parameter. No modules: what is left."""

    modules: tuple[nn.Module, ...]
    slots: tuple[tuple[ParameterUse, ...], ...]  # of each parameter, all its places

    @property
    def numel(self) -> int:
        """Of this tp rank's parts."""
        return sum(local_tensor(places[0].parameter.detach()).numel() for places in self.slots)


def units_of(model: nn.Module, wrap: Wrap = None) -> list[CommunicationUnit]:
    """The units in the order of the model, what is left first.

    `wrap` says which modules are units: patterns of their names ("layers.*", with * also for dots), a predicate of name
    and module, or a number: the smallest modules with so many parameters that are in no other unit. None: the blocks,
    which is every module of the outermost ModuleLists and ModuleDicts.

    A parameter that two units share makes one unit of both; one that is also elsewhere leaves its unit to what is left.
    Raises ValueError where a pattern matches nothing.
    """
    chosen = list(_chosen(model, wrap))
    owner = _owners(model, chosen)
    places: dict[int, list[ParameterUse]] = {}
    parents: dict[int, set[int]] = {}  # of each parameter, the units that hold it; -1: what is left
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append(ParameterUse(module, attribute))
            parents.setdefault(id(parameter), set()).add(owner[id(module)])
    together = _together(len(chosen), parents.values())
    units: dict[int, tuple[list[nn.Module], list[tuple[ParameterUse, ...]]]] = {-1: ([], [])}
    for index, module in enumerate(chosen):
        if together[index] != -1:
            units.setdefault(together[index], ([], []))[0].append(module)
    for key, slots in places.items():
        units[together[next(iter(parents[key]))]][1].append(tuple(slots))
    return [CommunicationUnit(tuple(modules), tuple(slots)) for modules, slots in units.values() if slots]


def _chosen(model: nn.Module, wrap: Wrap) -> Iterator[nn.Module]:
    """In the order of the model, an outer module before those in it; a module that has two names once."""
    if isinstance(wrap, int):
        large = _at_least(model, wrap)
        yield from (module for module in model.modules() if module is not model and id(module) in large)
        return
    names = list(_blocks(model)) if wrap is None else [] if callable(wrap) else list(wrap)
    matched: set[str] = set()
    for name, module in model.named_modules():
        hits = [pattern for pattern in names if name and fnmatchcase(name, pattern)]
        # "layers.*" means the blocks and not the modules in them.
        hits = [pattern for pattern in hits if name.count(".") == pattern.count(".")]
        matched.update(hits)
        if hits or (callable(wrap) and module is not model and wrap(name, module)):
            yield module
    missing = [name for name in names if name not in matched]
    if missing:
        raise ValueError(f"wrap: {', '.join(missing)} matches no module; its children are {_children(model)}")


def _children(model: nn.Module) -> str:
    return ", ".join(name for name, _ in model.named_children()) or "none"


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from (f"{prefix}{name}.{inner}" for inner, _ in child.named_children())
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def _at_least(model: nn.Module, numel: int) -> set[int]:
    """Modules with `numel` parameters outside of the units in them."""
    large: set[int] = set()

    def rest(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total = own + sum(rest(child) for child in module.children())
        callable_ = not isinstance(module, nn.ModuleList | nn.ModuleDict)  # those have no forward to hook
        if callable_ and total >= numel:
            large.add(id(module))
            return 0
        return total

    rest(model)
    return large


def _owners(model: nn.Module, chosen: Sequence[nn.Module]) -> dict[int, int]:
    """The innermost unit of each module, by its index; -1: none."""
    owner = {id(module): -1 for module in model.modules()}
    for index, unit in enumerate(chosen):  # an outer one comes first, and those in it take their modules from it
        for module in unit.modules():
            owner[id(module)] = index
    return owner


def _together(count: int, shared: Iterable[set[int]]) -> dict[int, int]:
    """Each unit's representative: the same for units that share a parameter."""
    parent = {index: index for index in range(-1, count)}

    def find(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    for units in shared:
        first = min(find(unit) for unit in units)
        for unit in units:
            parent[find(unit)] = first
    return {index: find(index) for index in parent}

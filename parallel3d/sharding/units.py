"""What of a model is gathered, or reduced, in one go: a unit is a block, say; what no unit holds is the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

_LISTS = nn.ModuleList | nn.ModuleDict  # which have no forward to hook
_LOOKED_UP = VocabParallelEmbedding | LearnedPositions | nn.Embedding
Wrap = Sequence[str | tuple[str, ...]] | Callable[[str, nn.Module], bool] | int | None


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
    """Modules whose parameters travel together: one, or several that share a parameter. The unit of what no other unit
    holds has no modules."""

    modules: tuple[nn.Module, ...]
    parameters: tuple[Uses, ...]

    @property
    def numel(self) -> int:
        """The elements of this tp rank's parts."""
        return sum(local_tensor(uses[0].parameter.detach()).numel() for uses in self.parameters)

    @property
    def has_head(self) -> bool:
        """Whether a loss may multiply by a weight of the unit after the unit's forward (`head_cross_entropy`)."""
        return any(isinstance(part, VocabParallelHead) for module in self.modules for part in module.modules())

    @property
    def is_looked_up(self) -> bool:
        """Whether all parameters are tables, whose rows are looked up: no backward reads their values."""
        return all(isinstance(use.module, _LOOKED_UP) for uses in self.parameters for use in uses)


def units_of(model: nn.Module, wrap: Wrap = None) -> list[CommunicationUnit]:
    """Returns the units in the order of the model, after the unit of what no other holds.

    `wrap` says which modules are units: patterns of their names ("layers.*", in which a * stands for one name between
    dots) or tuples of patterns, for modules that are one unit together, a predicate of name and module, or a number,
    for the smallest modules with so many parameters that are in no other unit. None means the blocks: every module of
    the outermost ModuleLists and ModuleDicts.

    A parameter that two units share makes one unit of both; one that is used outside of all units too leaves its unit.
    Raises ValueError if a pattern matches nothing.
    """
    chosen = list(_chosen(model, wrap))
    tuples = [each for each in wrap if isinstance(each, tuple)] if isinstance(wrap, Sequence) else []
    joined = [{chosen.index(module) for module in _chosen(model, each)} for each in tuples]
    index_of = {id(module): index for index, module in enumerate(chosen)}
    innermost: dict[str, int] = {}  # the unit around each place of the model; -1: none
    uses: dict[int, list[ParameterUse]] = {}
    holders: dict[int, set[int]] = {}  # the units that hold each parameter
    for place, module in model.named_modules(remove_duplicate=False):  # blocks may share a module
        around = innermost.get(place.rpartition(".")[0], -1)
        innermost[place] = index_of.get(id(module), around)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            use, others = ParameterUse(module, attribute), uses.setdefault(id(parameter), [])
            others += [] if use in others else [use]
            holders.setdefault(id(parameter), set()).add(innermost[place])
    merged = {index: index for index in range(-1, len(chosen))}  # the first of the units that go together
    for together in (*joined, *holders.values()):
        found = {merged[index] for index in together}
        if len(found) > 1:
            merged |= {index: min(found) for index, first in merged.items() if first in found}
    units: dict[int, tuple[list[nn.Module], list[Uses]]] = {-1: ([], [])}
    for index, module in enumerate(chosen):
        if merged[index] != -1:
            units.setdefault(merged[index], ([], []))[0].append(module)
    for key, places in uses.items():
        units[merged[next(iter(holders[key]))]][1].append(tuple(places))
    return [CommunicationUnit(tuple(modules), tuple(held)) for modules, held in units.values() if held]


def _chosen(model: nn.Module, wrap: Wrap) -> Iterator[nn.Module]:
    """Yields the modules that `wrap` means in the order of the model, an outer module before those in it, and a module
    that has two names once."""
    if isinstance(wrap, int):
        large = _at_least(model, wrap)
        yield from (module for module in model.modules() if module is not model and id(module) in large)
        return
    if wrap is None:  # what the outermost lists hold
        lists = [name for name, part in model.named_modules() if name and isinstance(part, _LISTS)]
        outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        wrap = [f"{name}.{inner}" for name in outermost for inner, _ in model.get_submodule(name).named_children()]
    flat = ((each,) if isinstance(each, str) else each for each in (() if callable(wrap) else wrap))
    names = [pattern for patterns in flat for pattern in patterns]
    matched: set[str] = set()
    for name, module in model.named_modules():
        hits = [pattern for pattern in names if name and fnmatchcase(name, pattern)]
        hits = [pattern for pattern in hits if name.count(".") == pattern.count(".")]  # a * does not cross a dot
        matched.update(hits)
        if hits or (callable(wrap) and module is not model and wrap(name, module)):
            yield module
    missing = [name for name in names if name not in matched]
    if missing:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ValueError(f"wrap: {', '.join(missing)} matches no module; its children are {children}")


def _at_least(model: nn.Module, numel: int) -> set[int]:
    """Returns the ids of the modules with `numel` parameters outside of the units in them."""
    large: set[int] = set()

    def rest(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total = own + sum(rest(child) for child in module.children())
        if total >= numel and not isinstance(module, _LISTS):
            large.add(id(module))
            return 0
        return total

    rest(model)
    return large

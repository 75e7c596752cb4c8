"""Splits an existing module, such as one of transformers, over tp in place, by a table of names
(`convert.rules`).

Every parameter becomes a DTensor on the tp axis under its old name and global shape, so state
dicts, `fully_shard` and checkpoints of another tp see what they saw before. Split modules work on
local tensors and local heads. Between them activations are whole on every rank, or split along the
sequence if the table says so.

[Note: packed weights] q, k and v that are packed along the output features cannot be split along
them: a shard would be q and half of k. Such a weight [O, I] is kept split along its *input*
features, which any tp reads back. Each forward exchanges it for this rank's rows of each matrix: an
all-to-all of O * I / n numbers, and another of their gradient.

[Note: shared heads] If tp is a multiple of the key-value heads, neighbouring ranks compute the same
head, from a weight that every rank keeps whole. Each rank gives the gradient of its own queries,
and the sum over tp joins them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import Replicate as ReplicatePlacement

from parallel3d.config.ranges import any_of, divisors_near
from parallel3d.convert.check import Example, checked
from parallel3d.convert.families import rules_of
from parallel3d.convert.parallel_modules import (
    ColumnParallel,
    ConvertedModule,
    EnterRegion,
    PackedColumnParallel,
    PackedPart,
    ParallelExperts,
    PretrainedModel,
    Replicated,
    RowParallel,
    ScatterSequence,
    VocabParallel,
    add_class,
    is_conv1d,
    is_linear,
)
from parallel3d.convert.rules import (
    WORDS,
    Column,
    Divide,
    Enter,
    Replicate,
    Row,
    Rules,
    Scatter,
    SplitExperts,
    Style,
    Vocab,
    names_matching,
)
from parallel3d.layers.gradients import as_dtensor
from parallel3d.layers.parameter import ParallelModule
from parallel3d.layers.replica_check import differ, fingerprints
from parallel3d.layers.sharded_module import draw_dtensors_whole
from parallel3d.mesh import Axis, Role
from parallel3d.shard_sizes import shard_rows

_log = logging.getLogger("parallel3d")


@dataclass(frozen=True)
class Part:
    """A module of the model, with its global name, its parent and the size of tp."""

    name: str
    module: nn.Module
    parent: nn.Module
    tp: int

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    def error(self, words: str) -> ValueError:
        return ValueError(f"{self.name}: {words}")

    def weight_size(self, dim: int) -> int:
        weight = self.module._parameters.get("weight")
        if weight is None:
            raise self.error(
                "computes its weight in each forward pass, by weight_norm, spectral_norm or "
                "another parametrization, and cannot be split; remove that first, for example by "
                "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
            )
        return weight.shape[dim]

    def count(self, attribute: str, owner: nn.Module) -> int:
        value: Any = owner
        for name in attribute.split("."):
            value = getattr(value, name, None)
        if not isinstance(value, int) or value < 1:
            words = f"its rule needs {type(owner).__name__}.{attribute}, and that is {value!r}"
            raise self.error(words)
        return value

    def check_divides(self, size: int, what: str) -> None:
        """Raises ValueError unless tp divides a size."""
        if size % self.tp:
            tries = any_of(divisors_near(size, self.tp))
            raise self.error(f"{size} {what} cannot be split over tp = {self.tp}; try tp = {tries}")


@dataclass(frozen=True)
class ModulePlan:
    """The class that a module gets and its settings, the dim that each parameter is split in (None:
    whole), and counts of modules that change."""

    part: Part
    parallel_class: type[ConvertedModule] | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, int | None] = field(default_factory=dict)
    counts: Mapping[tuple[nn.Module, str], int] = field(default_factory=dict)
    is_ruled: bool = True  # else the rule of a parameter that is tied to another one decides


def tensor_parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    rules: Rules | None = None,
    *,
    check: bool = True,
    example: Example | None = None,
) -> nn.Module:
    """Splits a module over tp in place and returns it.

    Every rank calls it with the same weights, before `fully_shard` and before the optimizer is
    built. Modules that are tensor-parallel already stay as they are. Dropout of activations that
    are not split needs the same random state on all tp ranks.

    Args:
        module: Module on any device. On the meta device nothing is compared.
        mesh: The tp axis, or a mesh that has it.
        rules: Table of names. Default: the table of the model's family (`families.rules_of`), which
            rank 0 logs.
        check: Compares all outputs and gradients of an example before and after the split.
        example: What the forward takes, by name or in order. Models of transformers need none.

    Raises:
        ValueError: The table does not fit the module, tp does not divide a size, or weights differ
            between ranks; the module is as it was. Or the check fails, and the module is split.
    """
    tp = mesh if mesh.ndim == 1 else mesh[Role.SPLIT_TENSORS]
    axis = Axis.of(tp)
    if rules is None:
        rules = rules_of(module)
        if dist.get_rank() == 0:
            family = module.config.model_type  # type: ignore[union-attr]
            _log.info("%s is split by the table of %s", type(module).__name__, family)
    plans = plan_modules(module, rules, axis.size)
    dims = split_dims(plans)
    if axis.size == 1:
        return module
    _refuse_different_weights(module, tp, axis)
    with checked(module, tp, example) if check else nullcontext():
        draw_dtensors_whole()
        sharded = {each: shard_parameter(each, dim, tp, axis) for each, dim in dims.items()}
        for plan in plans:
            _convert(plan, sharded, axis)
        for plan in plans:  # at last, because two layers of a parent may set the same count
            for (owner, attribute), count in plan.counts.items():
                _set_count(owner, attribute, count)
    for plan in plans:
        own = plan.part.module
        if isinstance(own, ColumnParallel | RowParallel | VocabParallel | ParallelExperts):
            refuse: Any = partial(_refuse_additions, module, plan.part.name)
            own.refuse_additions = refuse
    if hasattr(module, "save_pretrained") and not isinstance(module, PretrainedModel):
        add_class(module, PretrainedModel, axis)
    return module


def plan_modules(module: nn.Module, rules: Rules, tp: int) -> list[ModulePlan]:
    """Returns a plan for each module that is not tensor-parallel already. Raises ValueError."""
    styles = _styles_by_name(module, rules)
    plans = []
    for name, each in module.named_modules():
        is_split = any(isinstance(p, DTensor) for p in each._parameters.values())
        if not is_split and not isinstance(each, ParallelModule):
            parent = module.get_submodule(name.rpartition(".")[0])
            plans.append(_plan(Part(name, each, parent, tp), styles))
    return plans


def _styles_by_name(module: nn.Module, rules: Rules) -> dict[str, Style]:
    """Returns the style of each module that a rule matches."""
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, Style] = {}
    patterns: dict[str, str] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, str) and rule not in WORDS:
            words = f"{rule!r} is no style; try one of {', '.join(WORDS)}"
            raise ValueError(f"rule {pattern!r}: {words}")
        found = names_matching(pattern, names)
        if not found:
            nearest = get_close_matches(pattern.replace("**.", ""), names, 1, cutoff=0.0)
            raise ValueError(
                f"rule {pattern!r}: matches no module; the nearest name is "
                f"{(nearest or ['none'])[0]!r}"
            )
        for name in found:
            if name in styles:
                both = f"{patterns[name]!r} and {pattern!r}"
                raise ValueError(f"{name}: matched by two rules, {both}; keep one")
            styles[name] = WORDS[rule] if isinstance(rule, str) else rule
            patterns[name] = pattern
            _refuse_wrapper(module.get_submodule(name), name, pattern, styles[name])
    return styles


def _refuse_wrapper(wrapper: nn.Module, name: str, pattern: str, style: Style) -> None:
    """Raises ValueError if a rule splits a module that wraps several linear layers."""
    inner = [each for each, part in wrapper.named_modules() if each and is_linear(part)]
    if isinstance(style, Column | Row) and len(inner) > 1:
        rules = {pattern: "replicate", f"{pattern}.{inner[0]}": style}
        raise ValueError(
            f"{name}: is a {type(wrapper).__name__} around the linears {', '.join(inner)}, as in "
            f"LoRA; give each of them a rule: rules | {rules}, and likewise the adapter of the "
            "same split width; other adapters Replicate(partial_gradient=True) in a module with "
            'Enter() or sequence parallelism, else "replicate"'
        )


def _plan(part: Part, styles: Mapping[str, Style]) -> ModulePlan:
    settings: dict[str, Any]
    module, whole = part.module, dict.fromkeys(part.module._parameters)
    replicated = Replicated if whole else None
    match styles.get(part.name):
        case None:
            _refuse_if_rule_needed(part, styles)
            return ModulePlan(part, replicated, {}, whole, is_ruled=False)
        case Column() as style:
            return _plan_column(part, style, _is_entered(part.name, styles))
        case Row(sequence=sequence):
            _, dim = _weight_dims(part)
            part.check_divides(part.weight_size(dim), "input features")
            settings = {"sequence_parallel": sequence}
            return ModulePlan(part, RowParallel, settings, {**whole, "weight": dim})
        case Vocab():
            if not isinstance(module, nn.Embedding):
                raise part.error(f"is a {part.kind}; only nn.Embedding can be split by rows")
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                words = "max_norm, scale_grad_by_freq and sparse look at all rows; turn them off"
                raise part.error(words)
            if not shard_rows(module.num_embeddings, part.tp - 1, part.tp):
                part.check_divides(module.num_embeddings, "ids")
            return ModulePlan(part, VocabParallel, {}, {"weight": 0})
        case Enter(argument=argument, sequence=sequence):
            settings = {"argument": argument, "sequence_parallel": sequence}
            return ModulePlan(part, EnterRegion, settings, whole)
        case Scatter(argument=argument):
            return ModulePlan(part, ScatterSequence, {"argument": argument}, whole)
        case SplitExperts(count=attribute):
            count = part.count(attribute, module)
            part.check_divides(count, "experts")
            # transformers reads `_is_expert_parallel`.
            settings = {"count": count, "_is_expert_parallel": True}
            counts = {(module, attribute): count // part.tp}
            return ModulePlan(part, ParallelExperts, settings, dict.fromkeys(whole, 0), counts)
        case Divide(attributes=attributes, shared=shared):
            counts = {}
            for name in attributes:
                count = part.count(name, module)
                if name not in shared or part.tp % count:
                    part.check_divides(count, name)
                counts[module, name] = max(count // part.tp, 1)
            return ModulePlan(part, replicated, {}, whole, counts)
        case Replicate() as style:
            return ModulePlan(part, replicated, vars(style), whole)


def _refuse_if_rule_needed(part: Part, styles: Mapping[str, Style]) -> None:
    """Raises ValueError for a module without a rule that cannot be assumed to be replicated."""
    is_known = isinstance(part.module, nn.Embedding) or is_linear(part.module)
    # nn.MultiheadAttention computes with its own output layer.
    if is_known and not isinstance(part.parent, nn.MultiheadAttention):
        raise part.error(
            f'no rule says how to split this {part.kind}; try "replicate", which leaves it whole '
            "on every rank"
        )
    parent = part.name.rpartition(".")[0]
    for name, style in styles.items():
        is_beside = name.rpartition(".")[0] == parent and part.module._parameters
        if is_beside and isinstance(style, Column) and style.unit:  # such as Qwen 3's head norms
            raise part.error(
                f"no rule says what this {part.kind} works on, and the linear layers beside it are "
                "split by heads; try Replicate(partial_gradient=True) where it works on heads, and "
                '"replicate" where every rank has its whole input'
            )


def _plan_column(part: Part, style: Column, is_entered: bool) -> ModulePlan:
    """Plans a column-parallel layer that is split by whole units, shared or packed: [Note: shared
    heads] and [Note: packed weights]."""
    out_dim, in_dim = _weight_dims(part)
    whole: dict[str, int | None] = dict.fromkeys(part.module._parameters)
    features, tp = part.weight_size(out_dim), part.tp
    settings: dict[str, Any] = {
        "features": features,
        "gather_output": style.gather_output,
        "is_entered": is_entered,
    }
    units, width = _units(part, style, features)
    if style.parts != 1:
        part.check_divides(part.weight_size(in_dim), "input features")
        sizes = _sizes_of_parts(part, style.parts, units)
        for size in sizes:
            if tp % size:
                part.check_divides(size, f"units in one of the parts {sizes}")
        packed = [PackedPart(size * width, min(size, tp)) for size in sizes]
        few = min(sizes)
        counts = _counts_of_sharing(part, style.shared, few) if few % tp else {}
        settings["packed"] = packed
        dims = {**whole, "weight": in_dim}
        return ModulePlan(part, PackedColumnParallel, settings, dims, counts)
    if style.shared and tp > units and tp % units == 0:
        counts = _counts_of_sharing(part, style.shared, units)
        settings["shared_heads"] = units
        return ModulePlan(part, ColumnParallel, settings, whole, counts)
    if not (style.gather_output and width == 1):
        named = f"heads (output features / {style.unit})" if style.unit else "output features"
        part.check_divides(units, style.heads or named)
    dims = {name: out_dim if name == "weight" else 0 for name in whole}
    return ModulePlan(part, ColumnParallel, settings, dims)


def _units(part: Part, style: Column, features: int) -> tuple[int, int]:
    """Returns how many units of output features stay together, and the features of each."""
    named = style.heads or style.unit
    counted = part.count(named, part.parent) if named else 1
    other, left_over = divmod(features, counted)
    if left_over:
        raise part.error(f"{features} output features are no multiple of {named} = {counted}")
    return (counted, other) if style.heads else (other, counted)


def _sizes_of_parts(part: Part, parts: int | tuple[int | str, ...], units: int) -> list[int]:
    """Returns the units of each matrix that a weight packs."""
    if isinstance(parts, int):
        if units % parts:
            raise part.error(f"{units} units of output features are no {parts} equal parts")
        return [units // parts] * parts
    sizes = [part.count(each, part.parent) if isinstance(each, str) else each for each in parts]
    if sum(sizes) != units:
        added = " + ".join(map(str, sizes))
        raise part.error(
            f"its parts have {added} = {sum(sizes)} units, and its output features {units}"
        )
    return sizes


def _counts_of_sharing(
    part: Part, attribute: str | None, units: int
) -> dict[tuple[nn.Module, str], int]:
    """Returns how many query heads of a rank read a head that several ranks compute."""
    if attribute is None:
        return {}
    queries = part.count(attribute, part.parent) * units
    part.check_divides(queries, "query heads")
    return {(part.parent, attribute): queries // part.tp}


def _weight_dims(part: Part) -> tuple[int, int]:
    """Returns the dims of the weight's output and input features."""
    if not is_linear(part.module):
        raise part.error(f"is a {part.kind}; only nn.Linear and Conv1D can be split so")
    return (1, 0) if is_conv1d(part.module) else (0, 1)


def _is_entered(name: str, styles: Mapping[str, Style]) -> bool:
    """Returns True if a module around this one sums the gradient of its input."""
    around = accumulate(name.split("."), "{}.{}".format)
    return any(isinstance(styles.get(each), Enter) for each in around)


def split_dims(plans: Sequence[ModulePlan]) -> dict[nn.Parameter, int | None]:
    """Returns the dim that every parameter is split in. Raises ValueError if two names of a tied
    parameter disagree."""
    dims: dict[nn.Parameter, int | None] = {}
    for plan in sorted(plans, key=lambda plan: not plan.is_ruled):
        for name, dim in plan.dims.items():
            parameter = plan.part.module._parameters[name]
            if parameter is not None and dims.setdefault(parameter, dim) != dim and plan.is_ruled:
                raise ValueError(
                    f"{plan.part.name}.{name}: is tied to a parameter that another rule splits "
                    f"along dim {dims[parameter]}, and not {dim}; give both modules rules that "
                    "agree, such as vocab and column"
                )
    return dims


def shard_parameter(
    parameter: nn.Parameter, dim: int | None, tp: DeviceMesh, axis: Axis
) -> nn.Parameter:
    """Returns a full parameter as a DTensor that is split in `dim`, or whole on every rank."""
    full = local = parameter.detach()
    placement: Placement = ReplicatePlacement()
    if dim is not None:
        placement, rows = Shard(dim), shard_rows(full.shape[dim], axis.rank, axis.size)
        local = full.narrow(dim, rows.start, len(rows)).clone()
    return nn.Parameter(as_dtensor(local, tp, [placement], full), parameter.requires_grad)


def _convert(plan: ModulePlan, sharded: Mapping[nn.Parameter, nn.Parameter], axis: Axis) -> None:
    module, settings = plan.part.module, dict(plan.settings)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = sharded[parameter]
    if plan.parallel_class in (EnterRegion, ScatterSequence) and module._parameters:
        add_class(module, Replicated, axis)
    heads = settings.pop("shared_heads", None)
    if heads is not None:
        width, head = settings["features"] // heads, axis.rank * heads // axis.size
        settings["rows"] = slice(head * width, (head + 1) * width)
    if plan.parallel_class is not None:
        add_class(module, plan.parallel_class, axis, **settings)


def _set_count(owner: nn.Module, attribute: str, count: int) -> None:
    """Sets a count of a module, or of its config, of which the module gets a copy of its own."""
    name, _, of_config = attribute.partition(".")
    if of_config:
        config = copy.copy(getattr(owner, name))
        setattr(config, of_config, count)
        setattr(owner, name, config)
    else:
        setattr(owner, name, count)


def _refuse_additions(module: nn.Module, name: str) -> None:
    """Raises RuntimeError for a parameter that was added inside a layer after it was split."""
    for own, parameter in module.get_submodule(name).named_parameters():
        if not isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{name}.{own}: was added after {name} was split over tp, and would see only a "
                "part of its input or output; add adapters such as LoRA before tensor_parallelize, "
                "and give their layers rules of their own"
            )


def _refuse_different_weights(module: nn.Module, tp: DeviceMesh, axis: Axis) -> None:
    """Raises ValueError if the ranks start from different weights."""
    named = dict(module.named_parameters())
    if not named or any(each.is_meta or isinstance(each, DTensor) for each in named.values()):
        return
    differing = differ(fingerprints([*named.values()]).to(tp.device_type), axis)
    for name, differs in zip(named, differing.tolist(), strict=True):
        if differs:
            raise ValueError(
                f"{name}: starts from other values on another tp rank; load the same checkpoint on "
                "every rank, or call torch.manual_seed(0) before the model is built"
            )

"""An existing module, say one of transformers', made tensor-parallel in place by a table of names (`layers.rules`).

Every parameter becomes a DTensor on the tp axis under its old name and global shape, so that a state dict,
`fully_shard` and a checkpoint of any other tp see what they saw before. A module keeps its class as a base, and its
forward unless it is split: that then works on local tensors and local heads. Activations between the split layers are
whole on every rank, and so is a norm's gradient; or, where the table says so, split along the sequence.

[Note: packed weights] q, k and v packed along the output features cannot be split along them: a shard would be q and
half of k, and at another tp something else. Nor can each rank keep its rows of each product: no checkpoint, optimizer
state or `full_tensor` of torch knows a part that is several pieces. Such a weight [O, I], O the features of all the
products, is kept split along its *input* features, which any tp reads back, and each forward exchanges it for this
rank's rows of each product: an all-to-all of the shard, O * I / n numbers, and another of the gradient, with which that
of its small bias goes, which is whole on every rank.

[Note: shared heads] Where tp is a multiple of the key-value heads, neighbouring ranks compute the same head, from a
weight that every rank keeps whole; each gives the gradient of its own queries, and the sum over tp joins them.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d.config.ranges import any_of, divisors_near
from parallel3d.convert.check import Example, checked
from parallel3d.convert.families import rules_of
from parallel3d.convert.forms import (
    ColumnForm,
    EmbeddingForm,
    EnterForm,
    ExpertsForm,
    Form,
    PackedPart,
    ReplicatedForm,
    RowForm,
    SavingForm,
    ScatterForm,
    SplitEmbeddingForm,
    is_conv1d,
    is_linear,
    on_axis,
    reform,
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
    Word,
    names_matching,
)
from parallel3d.layers.agreement import differ, fingerprints
from parallel3d.layers.parameter import ParallelModule
from parallel3d.mesh import Axis

_log = logging.getLogger("parallel3d")
_SPLIT_FORMS = (ColumnForm, RowForm, EmbeddingForm, SplitEmbeddingForm, ExpertsForm)


@dataclass(frozen=True)
class Part:
    """A module of the model, with its global name, its parent and the size of tp."""

    name: str
    module: nn.Module
    parent: nn.Module
    tp: int

    def size_of_weight(self, dim: int) -> int:
        weight = self.module._parameters.get("weight")
        if weight is None:
            raise ValueError(
                f"{self.name}: computes its weight in each forward pass, by weight_norm, spectral_norm or another "
                "parametrization, and cannot be split; remove that first, for example by "
                "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
            )
        return weight.shape[dim]

    def count(self, attribute: str, owner: nn.Module) -> int:
        value: object = owner
        for name in attribute.split("."):
            value = getattr(value, name, None)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.name}: its rule needs {type(owner).__name__}.{attribute}, and that is {value!r}")
        return value

    def uneven(self, size: int, what: str) -> ValueError:
        tries = any_of(divisors_near(size, self.tp))
        return ValueError(f"{self.name}: {size} {what} cannot be split over tp = {self.tp}; try tp = {tries}")


@dataclass(frozen=True)
class ModulePlan:
    """Says what becomes of one module: its form, the dim that each of its parameters is split in (None: whole), and the
    counts on modules that follow from it."""

    part: Part
    form: type[Form] | None
    settings: dict[str, object] = field(default_factory=dict)
    dims: dict[str, int | None] = field(default_factory=dict)
    counts: dict[tuple[nn.Module, str], int] = field(default_factory=dict)
    is_ruled: bool = True  # else a parameter that is tied to another's is laid as the rule of that one says


def tensor_parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    rules: Rules | None = None,
    *,
    check: bool = True,
    example: Example | None = None,
) -> nn.Module:
    """Splits `module` over tp in place, as the table `rules` says, and returns it. `mesh` is the tp axis, or has one of
    that name. Every rank calls it with the same weights, on any device (on the meta device nothing is compared).
    Without `rules` a model of transformers is split by its family's table (`families.rules_of`), which rank 0 logs.

    With `check` a tiny `example`, what the forward takes (by name or in order), goes forward and backward through the
    module before and after, and all outputs and gradients must agree; a model of transformers needs no example.

    Call it before `fully_shard` and before the optimizer is built. Dropout of whole activations needs the same random
    state on all tp ranks. Modules that are tensor-parallel already stay as they are.

    Raises ValueError, with the module as it was: a pattern that matches nothing, a module that two rules match, a
    linear or an embedding that none does, a size that tp does not divide, weights that differ between the ranks. Raises
    ValueError, with the module split, where the check finds that it computes something else."""
    tp = mesh if mesh.ndim == 1 else mesh["tp"]
    axis = Axis.of(tp)
    if rules is None:
        rules = rules_of(module)
        if dist.get_rank() == 0:
            _log.info("%s is split by the table of %s", type(module).__name__, module.config.model_type)  # type: ignore[union-attr]
    plans = plan_modules(module, rules, axis.size)
    dims = split_dims(plans)
    if axis.size == 1:
        return module
    _refuse_different_weights(module, tp, axis)
    with checked(module, tp, example) if check else nullcontext():
        placed = {
            parameter: on_axis(parameter, dim, tp, axis) for parameter, dim in dims.items()
        }  # tied ones stay tied
        for plan in plans:
            own = plan.part.module._parameters
            own.update({name: placed[parameter] for name, parameter in own.items() if parameter is not None})
            if plan.form in (EnterForm, ScatterForm) and plan.part.module._parameters:
                reform(plan.part.module, ReplicatedForm, axis)
            if plan.form is not None:
                reform(plan.part.module, plan.form, axis, **plan.settings)
        for plan in plans:  # at last: two layers of one parent may ask for the same new count
            for (owner, attribute), count in plan.counts.items():
                _set_count(owner, attribute, count)
    for plan in plans:
        if plan.form in _SPLIT_FORMS:
            plan.part.module.refuse_additions = partial(_refuse_additions, module, plan.part.name)  # type: ignore[assignment]
    if hasattr(module, "save_pretrained") and not isinstance(module, SavingForm):
        reform(module, SavingForm, axis)
    return module


def plan_modules(module: nn.Module, rules: Rules, tp: int) -> list[ModulePlan]:
    """A plan for each module that is not tensor-parallel already. Raises ValueError."""
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, Style] = {}
    by_pattern: dict[str, str] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, str) and rule not in WORDS:
            raise ValueError(f"rule {pattern!r}: {rule!r} is no style; try one of {', '.join(WORDS)}")
        found = names_matching(pattern, names)
        if not found:
            nearest = get_close_matches(pattern.replace("**.", ""), names, 1, cutoff=0.0)
            near = f"the nearest name is {nearest[0]!r}" if nearest else f"{type(module).__name__} has none inside"
            raise ValueError(f"rule {pattern!r}: matches no module; {near}")
        for name in found:
            if name in styles:
                raise ValueError(f"{name}: matched by two rules, {by_pattern[name]!r} and {pattern!r}; keep one")
            styles[name], by_pattern[name] = WORDS[rule] if isinstance(rule, str) else rule, pattern
    if inner_rules := _rules_inside_wrappers(module, styles, by_pattern):
        first = next(name for name in by_pattern if by_pattern[name] in inner_rules)
        raise ValueError(
            f"{first}: is a {type(module.get_submodule(first)).__name__} around several linears, as LoRA's; give these "
            f"rules of their own, for example rules | {inner_rules}"
        )
    return [
        _plan(Part(name, part, module.get_submodule(name.rpartition(".")[0]), tp), styles)
        for name, part in module.named_modules()
        if not (isinstance(part, ParallelModule) or any(isinstance(p, DTensor) for p in part._parameters.values()))
    ]


def _plan(part: Part, styles: Mapping[str, Style]) -> ModulePlan:
    style = styles.get(part.name)
    whole: dict[str, int | None] = dict.fromkeys(part.module._parameters)
    if style is None:
        is_known = isinstance(part.module, nn.Linear | nn.Embedding) or is_conv1d(part.module)
        if is_known and not isinstance(part.parent, nn.MultiheadAttention):  # which computes with all of its own
            raise ValueError(
                f"{part.name}: no rule says how to split this {type(part.module).__name__}; "
                f'try "replicate", which leaves it whole on every rank'
            )
        parent = part.name.rpartition(".")[0]
        beside = (each for name, each in styles.items() if name.rpartition(".")[0] == parent)
        if whole and any(isinstance(each, Column) and each.unit for each in beside):  # such as Qwen 3's norms of heads
            raise ValueError(
                f"{part.name}: no rule says what this {type(part.module).__name__} works on, and the linear layers "
                "beside it are split by heads; try Replicate(partial_gradient=True) where it works on heads, and "
                '"replicate" where every rank has its whole input'
            )
        return ModulePlan(part, ReplicatedForm if whole else None, {}, whole, is_ruled=False)
    match style:
        case Column():
            return _plan_column(part, style, _is_entered(part.name, styles))
        case Row():
            dim = 0 if _is_transposed(part) else 1
            if part.size_of_weight(dim) % part.tp:
                raise part.uneven(part.size_of_weight(dim), "input features")
            return ModulePlan(part, RowForm, vars(style), {**whole, "weight": dim})
        case Vocab():
            module = part.module
            if not isinstance(module, nn.Embedding):
                raise ValueError(f"{part.name}: is a {type(module).__name__}; only nn.Embedding can be split by rows")
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                advice = "max_norm, scale_grad_by_freq and sparse look at all rows; turn them off"
                raise ValueError(f"{part.name}: {advice}")
            return ModulePlan(part, EmbeddingForm, dims={"weight": 0})
        case Enter() | Scatter():
            return ModulePlan(part, EnterForm if isinstance(style, Enter) else ScatterForm, vars(style), whole)
        case SplitExperts():
            count = part.count(style.count, part.module)
            if count % part.tp:
                raise part.uneven(count, "experts")
            settings: dict[str, object] = {"count": count, "_is_expert_parallel": True}  # which transformers reads
            counts = {(part.module, style.count): count // part.tp}
            return ModulePlan(part, ExpertsForm, settings, dict.fromkeys(whole, 0), counts)
        case Divide():
            shares = {}
            for name in style.attributes:
                count = part.count(name, part.module)
                is_shared = name in style.shared and part.tp % count == 0
                if count % part.tp and not is_shared:
                    raise part.uneven(count, name)
                shares[part.module, name] = max(count // part.tp, 1)
            return ModulePlan(part, ReplicatedForm if whole else None, {}, whole, shares)
        case Replicate():
            return ModulePlan(part, ReplicatedForm if whole else None, vars(style), whole)


def _plan_column(part: Part, style: Column, entered: bool) -> ModulePlan:
    """Plans a column-parallel layer: split by whole units, or shared or packed ([Note: shared heads] and [Note: packed
    weights] in `convert.apply`)."""
    whole: dict[str, int | None] = dict.fromkeys(part.module._parameters)
    if isinstance(part.module, nn.Embedding):
        if part.size_of_weight(1) % part.tp:
            raise part.uneven(part.size_of_weight(1), "columns")
        return ModulePlan(part, SplitEmbeddingForm, dims={"weight": 1})
    out_dim, in_dim = (1, 0) if _is_transposed(part) else (0, 1)
    features = part.size_of_weight(out_dim)
    settings: dict[str, object] = {"features": features, "gather_output": style.gather_output, "entered": entered}
    named = style.heads or style.unit
    counted = part.count(named, part.parent) if named else 1
    units, left_over = divmod(features, counted)
    if left_over:
        raise ValueError(f"{part.name}: {features} output features are no multiple of {named} = {counted}")
    if style.heads:
        units, counted = counted, units
    what = style.heads or (f"heads (output features / {style.unit})" if style.unit else "output features")
    if style.parts != 1:
        if part.size_of_weight(in_dim) % part.tp:
            raise part.uneven(part.size_of_weight(in_dim), "input features")
        sizes = _sizes_of_parts(part, style.parts, units)
        uneven = [size for size in sizes if size % part.tp and part.tp % size]
        if uneven:
            raise part.uneven(uneven[0], f"units in one of the parts {sizes}")
        packed = [PackedPart(size * counted, min(size, part.tp)) for size in sizes]
        few = min(sizes) if min(sizes) % part.tp else None  # heads that several ranks compute
        counts = _shrunk(part, style.shared, few) if style.shared and few else {}
        return ModulePlan(part, ColumnForm, {**settings, "packed": packed}, {**whole, "weight": in_dim}, counts)
    if style.shared and part.tp > units and part.tp % units == 0:
        counts = _shrunk(part, style.shared, units)
        return ModulePlan(part, ColumnForm, {**settings, "shared_heads": units}, whole, counts)
    if units % part.tp and not (style.gather_output and counted == 1):
        raise part.uneven(units, what)
    return ModulePlan(part, ColumnForm, settings, {name: out_dim if name == "weight" else 0 for name in whole})


def _sizes_of_parts(part: Part, parts: int | tuple[int | str, ...], units: int) -> list[int]:
    """Returns the units that each product of a packed weight has."""
    if isinstance(parts, int):
        if units % parts:
            raise ValueError(f"{part.name}: {units} units of output features are no {parts} equal parts")
        return [units // parts] * parts
    sizes = [part.count(each, part.parent) if isinstance(each, str) else each for each in parts]
    if sum(sizes) != units:
        added = " + ".join(map(str, sizes))
        raise ValueError(f"{part.name}: its parts have {added} = {sum(sizes)} units, and its output features {units}")
    return sizes


def _shrunk(part: Part, attribute: str, units: int) -> dict[tuple[nn.Module, str], int]:
    """Returns how many heads of a rank read one of so few units that several ranks compute the same."""
    group = part.count(attribute, part.parent)
    if group * units % part.tp:
        raise part.uneven(group * units, "query heads")
    return {(part.parent, attribute): group * units // part.tp}


def _set_count(owner: nn.Module, attribute: str, count: int) -> None:
    """Sets a count of a module, or of its config, of which the module gets a copy of its own."""
    name, _, of_config = attribute.partition(".")
    if of_config:
        config = copy.copy(getattr(owner, name))
        setattr(config, of_config, count)
        setattr(owner, name, config)
    else:
        setattr(owner, name, count)


def _is_transposed(part: Part) -> bool:
    """Whether the weight is [in, out]. Raises ValueError for what is no plain linear layer."""
    if is_conv1d(part.module):
        return True
    if not is_linear(part.module):
        raise ValueError(f"{part.name}: is a {type(part.module).__name__}; only nn.Linear and Conv1D can be split so")
    return False


def _rules_inside_wrappers(
    module: nn.Module, styles: Mapping[str, Style], by_pattern: Mapping[str, str]
) -> dict[str, Style | Word]:
    """Returns rules for the linears inside of modules that a rule splits and that are around several linears. A linear
    of the full width of what is split is split as its wrapper was to be; the others are whole on each rank."""
    words = {style: word for word, style in WORDS.items()}
    rules: dict[str, Style | Word] = {}
    for name, style in styles.items():
        wrapper, pattern = module.get_submodule(name), by_pattern[name]
        linears = {
            each: part for each, part in wrapper.named_modules() if each and (is_linear(part) or is_conv1d(part))
        }
        if not isinstance(style, Column | Row) or len(linears) < 2:
            continue
        is_column, own = isinstance(style, Column), style
        if isinstance(style, Column):
            own, is_partial = replace(style, unit=None, heads=None, shared=None), _is_entered(name, styles)
        else:
            is_partial = style.sequence
        other = Replicate(partial_gradient=is_partial)
        widths = {each: part.weight.shape[is_column == is_conv1d(part)] for each, part in linears.items()}
        rules[pattern] = "replicate"
        for each, width in widths.items():
            found = own if width == max(widths.values()) else other
            rules[f"{pattern}.{each}"] = words.get(found, found)
    return rules


def _is_entered(name: str, styles: Mapping[str, Style]) -> bool:
    """Returns whether a module around this one sums the gradient of its input."""
    around = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(isinstance(styles.get(each), Enter) for each in around)


def split_dims(plans: list[ModulePlan]) -> dict[nn.Parameter, int | None]:
    """Returns the dim that every parameter is split in. Raises ValueError where two names of a tied one disagree."""
    dims: dict[nn.Parameter, int | None] = {}
    for plan in sorted(plans, key=lambda plan: not plan.is_ruled):
        for name, dim in plan.dims.items():
            parameter = plan.part.module._parameters[name]
            if parameter is not None and dims.setdefault(parameter, dim) != dim and plan.is_ruled:
                raise ValueError(
                    f"{plan.part.name}.{name}: is tied to a parameter that another rule splits along dim "
                    f"{dims[parameter]}, and not {dim}; give both modules rules that agree, such as vocab and column"
                )
    return dims


def _refuse_additions(module: nn.Module, name: str) -> None:
    """Raises RuntimeError for a parameter that was added inside a layer after it was split."""
    for own, parameter in module.get_submodule(name).named_parameters():
        if not isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{name}.{own}: was added after {name} was split over tp, and would see only a part of its input or "
                "output; add adapters such as LoRA before tensor_parallelize, and give their layers rules of their own"
            )


def _refuse_different_weights(module: nn.Module, tp: DeviceMesh, axis: Axis) -> None:
    """Raises ValueError where the ranks start from different weights: their parts would be of several models."""
    named = [(name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor) and not p.is_meta]
    if not named:
        return
    differing = differ(fingerprints([p for _, p in named]).to(tp.device_type), axis)
    for (name, _), differs in zip(named, differing.tolist(), strict=True):
        if differs:
            raise ValueError(
                f"{name}: starts from other values on another tp rank; load the same checkpoint on every rank, or call "
                f"torch.manual_seed(0) before the model is built"
            )

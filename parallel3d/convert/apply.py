"""An existing module, say one of transformers', made tensor-parallel in place by a table of names (`layers.rules`).

Every parameter becomes a DTensor on the tp axis under its old name and global shape, so that a state dict,
`fully_shard` and a checkpoint of any other tp see what they saw before. A module keeps its class as a base, and its
forward unless it is split: that then works on local tensors and local heads. Activations between the split layers are
whole on every rank, and so is a norm's gradient; or, where the table says so, split along the sequence.

[Note: packed weights] q, k and v packed along the output features cannot be split along them: a shard would be q and
half of k, and at another tp something else. Such a weight [I, P * O] (GPT-2's c_attn, transposed) is kept split along
its *input* features, which any tp reads back, and each forward exchanges it for this rank's columns of all P matrices:
an all-to-all of the shard, I * P * O / n numbers, and another of the gradient. Its small bias is whole on every rank.

[Note: shared heads] Where tp is a multiple of the key-value heads, neighbouring ranks compute the same head, from a
weight that every rank keeps whole; each gives the gradient of its own queries, and the sum over tp joins them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d.config.ranges import any_of, divisors_near
from parallel3d.convert.check import Example, checked
from parallel3d.convert.forms import (
    ColumnForm,
    EmbeddingForm,
    EnterForm,
    Form,
    ReplicatedForm,
    RowForm,
    SavingForm,
    ScatterForm,
    is_conv1d,
    on_axis,
    reform,
)
from parallel3d.convert.rules import WORDS, Column, Divide, Enter, Replicate, Row, Rules, Scatter, Style, Vocab
from parallel3d.layers.agreement import differ, fingerprints
from parallel3d.layers.parameter import ParallelModule
from parallel3d.mesh import Axis


@dataclass(frozen=True)
class Part:
    """A module of the model, with its global name, its parent and the size of tp."""

    name: str
    module: nn.Module
    parent: nn.Module
    tp: int

    def size_of_weight(self, dim: int) -> int:
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.shape[dim]

    def count(self, attribute: str, owner: nn.Module) -> int:
        value = getattr(owner, attribute, None)
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


def tensor_parallelize(
    module: nn.Module, mesh: DeviceMesh, rules: Rules, *, check: bool = True, example: Example | None = None
) -> nn.Module:
    """Splits `module` over tp in place, as the table `rules` says, and returns it. `mesh` is the tp axis, or has one of
    that name. Every rank calls it with the same weights, on any device (on the meta device nothing is compared).

    With `check` a tiny `example`, what the forward takes (by name or in order), goes forward and backward through the
    module before and after, and all outputs and gradients must agree; a model of transformers needs no example.

    Call it before `fully_shard` and before the optimizer is built. Dropout of whole activations needs the same random
    state on all tp ranks. Modules that are tensor-parallel already stay as they are.

    Raises ValueError, with the module as it was: a pattern that matches nothing, a module that two rules match, a
    linear or an embedding that none does, a size that tp does not divide, weights that differ between the ranks. Raises
    ValueError, with the module split, where the check finds that it computes something else."""
    tp = mesh if mesh.ndim == 1 else mesh["tp"]
    axis = Axis.of(tp)
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
                setattr(owner, attribute, count)
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
        expression = re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*", r"[^.]+")
        found = [name for name in names if re.fullmatch(expression, name)]
        if not found:
            nearest = get_close_matches(pattern.replace("**.", ""), names, 1, cutoff=0.0)
            near = f"the nearest name is {nearest[0]!r}" if nearest else f"{type(module).__name__} has none inside"
            raise ValueError(f"rule {pattern!r}: matches no module; {near}")
        for name in found:
            if name in styles:
                raise ValueError(f"{name}: matched by two rules, {by_pattern[name]!r} and {pattern!r}; keep one")
            styles[name], by_pattern[name] = WORDS[rule] if isinstance(rule, str) else rule, pattern
    return [
        _plan(Part(name, part, module.get_submodule(name.rpartition(".")[0]), tp), styles)
        for name, part in module.named_modules()
        if not (isinstance(part, ParallelModule) or any(isinstance(p, DTensor) for p in part._parameters.values()))
    ]


def _plan(part: Part, styles: Mapping[str, Style]) -> ModulePlan:
    style = styles.get(part.name)
    whole: dict[str, int | None] = dict.fromkeys(part.module._parameters)
    if style is None:
        if isinstance(part.module, nn.Linear | nn.Embedding) or is_conv1d(part.module):
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
        style = Replicate()
    match style:
        case Column():
            # A module around this one may sum the gradient of its input.
            around = itertools.accumulate(part.name.split("."), "{}.{}".format)
            return _plan_column(part, style, any(isinstance(styles.get(name), Enter) for name in around))
        case Row():
            dim = 0 if _is_transposed(part) else 1
            if part.size_of_weight(dim) % part.tp:
                raise part.uneven(part.size_of_weight(dim), "input features")
            return ModulePlan(part, RowForm, vars(style), {**whole, "weight": dim})
        case Vocab():
            module = part.module
            if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
                raise ValueError(f"{part.name}: is a {type(module).__name__}; only nn.Embedding can be split by rows")
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                advice = "max_norm, scale_grad_by_freq and sparse look at all rows; turn them off"
                raise ValueError(f"{part.name}: {advice}")
            return ModulePlan(part, EmbeddingForm, dims={"weight": 0})
        case Enter() | Scatter():
            return ModulePlan(part, EnterForm if isinstance(style, Enter) else ScatterForm, vars(style), whole)
        case Divide():
            counts = {(part.module, name): part.count(name, part.module) for name in style.attributes}
            for (_, name), count in counts.items():
                if count % part.tp:
                    raise part.uneven(count, name)
            shares = {owner_and_name: count // part.tp for owner_and_name, count in counts.items()}
            return ModulePlan(part, ReplicatedForm if whole else None, {}, whole, shares)
        case Replicate():
            return ModulePlan(part, ReplicatedForm if whole else None, vars(style), whole)


def _plan_column(part: Part, style: Column, entered: bool) -> ModulePlan:
    """Plans a column-parallel layer: split by whole units, or shared or packed ([Note: shared heads] and [Note: packed
    weights] in `convert.apply`)."""
    transposed = _is_transposed(part)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    features = part.size_of_weight(out_dim)
    settings: dict[str, object] = {"features": features, "gather_output": style.gather_output, "entered": entered}
    unit = part.count(style.unit, part.parent) if style.unit else 1
    units, left_over = divmod(features, unit * style.packed)
    what = f"heads (output features / {style.unit})" if style.unit else "output features"
    if left_over:
        raise ValueError(f"{part.name}: {features} output features are no multiple of {style.packed} x {unit}")
    whole: dict[str, int | None] = dict.fromkeys(part.module._parameters)
    if style.packed > 1:
        if not transposed:
            advice = "packed matrices are known of Conv1D alone; give q, k and v a linear layer each"
            raise ValueError(f"{part.name}: {advice}")
        if units % part.tp or part.size_of_weight(in_dim) % part.tp:
            raise part.uneven(units, what)
        return ModulePlan(part, ColumnForm, {**settings, "packed": style.packed}, {**whole, "weight": in_dim})
    if style.shared and part.tp > units and part.tp % units == 0:
        group = part.count(style.shared, part.parent)
        if group * units % part.tp:
            raise part.uneven(group * units, "query heads")
        counts = {(part.parent, style.shared): group * units // part.tp}
        return ModulePlan(part, ColumnForm, {**settings, "shared_heads": units}, whole, counts)
    if units % part.tp and not (style.gather_output and unit == 1):
        raise part.uneven(units, what)
    return ModulePlan(part, ColumnForm, settings, {name: out_dim if name == "weight" else 0 for name in whole})


def _is_transposed(part: Part) -> bool:
    """Whether the weight is [in, out]. Raises ValueError for what is no plain linear layer."""
    if is_conv1d(part.module):
        return True
    if type(part.module).forward is not nn.Linear.forward:
        raise ValueError(f"{part.name}: is a {type(part.module).__name__}; only nn.Linear and Conv1D can be split so")
    return False


def split_dims(plans: list[ModulePlan]) -> dict[nn.Parameter, int | None]:
    """Returns the dim that every parameter is split in. Raises ValueError where two names of a tied one disagree."""
    dims: dict[nn.Parameter, int | None] = {}
    for plan in plans:
        for name, dim in plan.dims.items():
            parameter = plan.part.module._parameters[name]
            if parameter is not None and dims.setdefault(parameter, dim) != dim:
                raise ValueError(
                    f"{plan.part.name}.{name}: is tied to a parameter that another rule splits along dim "
                    f"{dims[parameter]}, and not {dim}; give both modules rules that agree, such as vocab and column"
                )
    return dims


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

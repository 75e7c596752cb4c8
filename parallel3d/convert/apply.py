"""Splits an existing module, such as a Hugging Face model, over tp in place, following rules.

The rules map name patterns to styles (`convert.rules`). Every parameter becomes a DTensor on the tp
axis with its old name and global shape. State dicts, `fully_shard` and checkpoints of another tp
see the same tensors as before. Split modules compute on local tensors and local heads. Activations
between them are replicated, or split along the sequence if the rules ask for it.

[Note: packed weights] q, k and v that are packed along the output features cannot be sharded along
them: one shard would hold q and half of k. Such a weight [O, I] is stored sharded along its *input*
features, which any tp can load. Each forward pass exchanges it for this rank's rows of each matrix,
with an all-to-all of O * I / n numbers. The backward pass exchanges the gradient in the same way.
Key/value weights with fewer heads than ranks are treated in the same way: neighboring ranks compute
the same head, and each contributes the gradient of its own queries.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d.config.example_values import any_of, nearest
from parallel3d.convert.check import Example, checked
from parallel3d.convert.families import rules_of
from parallel3d.convert.parallel_modules import (
    ColumnParallel,
    ConvertedExperts,
    EnterRegion,
    PackedColumnParallel,
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
from parallel3d.layers.parameter import (
    ParallelModule,
    ShardedModule,
    refuse_another_draw,
    shard_tensor,
)
from parallel3d.mesh import Axis, Role
from parallel3d.shard_sizes import divisors, shard_rows


@dataclass
class ModulePlan:
    """Conversion of one module.

    If `style` is None, a shared parameter is split by the rule of the other module.
    """

    name: str  # Name in the model.
    module: nn.Module
    parent: nn.Module
    tp: int
    style: Style | None
    dims: dict[str, int | None]  # Sharded dim of each parameter, None if replicated.
    parallel_class: type[ShardedModule] | None
    # Attributes to set on the converted module.
    settings: dict[str, Any] = field(default_factory=dict)
    # New values of counts, such as the local number of heads, keyed by (module, attribute).
    counts: dict[tuple[nn.Module, str], int] = field(default_factory=dict)

    def error(self, words: str) -> ValueError:
        return ValueError(f"{self.name}: {words}")

    def weight_size(self, dim: int) -> int:
        weight = self.module._parameters.get("weight")
        if weight is None:
            raise self.error("its weight is parametrized; remove the parametrization first")
        return weight.shape[dim]

    def count(self, attribute: str, owner: nn.Module) -> int:
        value: Any = owner
        for name in attribute.split("."):
            value = getattr(value, name, None)
        if not isinstance(value, int) or value < 1:
            words = f"its rule needs {type(owner).__name__}.{attribute} >= 1, but it is {value!r}"
            raise self.error(words)
        return value

    def check_divides(self, size: int, what: str) -> None:
        """Raises ValueError unless tp divides `size`."""
        if size % self.tp:
            tries = any_of(nearest(divisors(size), self.tp))
            raise self.error(f"{size} {what} cannot be split over tp = {self.tp}; try tp = {tries}")


def tensor_parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    rules: Rules | None = None,
    *,
    check: bool = True,
    example: Example | None = None,
) -> nn.Module:
    """Splits a module over tp in place and returns it.

    Call it on every rank with the same weights, before `fully_shard` and before you build the
    optimizer. Modules that are already tensor-parallel stay unchanged. Dropout of replicated
    activations needs the same random state on all tp ranks.

    Args:
        module: Module on any device. On the meta device, weights are not compared between ranks and
            the check is skipped.
        mesh: The tp axis, or a mesh that contains it.
        rules: Maps name patterns to styles. Default: the rules of the model's family (`rules_of`).
        check: If True, runs an example before and after the split and compares module outputs and
            parameter gradients.
        example: Arguments of the forward pass, by name or in order. Not needed for Hugging Face
            models.

    Returns:
        The same module.

    Raises:
        ValueError: The rules do not fit the module, tp does not divide a size, or weights differ
            between ranks. The module is then unchanged. Also raised if the check fails, after the
            split.

    Example:
        >>> model = LlamaForCausalLM(config)  # equal weights on every rank
        >>> model = parallel3d.tensor_parallelize(model, mesh["tp"])

        >>> rules = {"embed": "vocab", "blocks.*.up": "column", "blocks.*.down": "row"}
        >>> model = parallel3d.tensor_parallelize(model, mesh["tp"], rules, example=ids)
    """
    tp = mesh if mesh.ndim == 1 else mesh[Role.SPLIT_TENSORS]
    axis = Axis.of(tp)
    plans = plan_modules(module, rules or rules_of(module), axis.size)
    dims = split_dims(plans)
    if axis.size == 1:
        return module
    for name, parameter in module.named_parameters():
        if not parameter.is_meta and not isinstance(parameter, DTensor):
            refuse_another_draw(name, parameter, axis, tp.device_type)
    with checked(module, tp, example) if check else nullcontext():
        sharded = {}
        for each, dim in dims.items():
            part = shard_tensor(each.detach(), dim, tp)
            sharded[each] = nn.Parameter(part, each.requires_grad)
        for plan in plans:
            own = plan.module._parameters
            for name, whole in own.items():
                if whole is not None:
                    own[name] = sharded[whole]
            if plan.parallel_class is not None:
                add_class(plan.module, plan.parallel_class, axis, **plan.settings)
        for plan in plans:  # Last, because two layers of one parent may set the same count.
            for (owner, attribute), count in plan.counts.items():
                _set_count(owner, attribute, count)
    for plan in plans:
        if isinstance(plan.style, Column | Row | Vocab):
            _refuse_additions(module, plan)
    return module


def _refuse_additions(root: nn.Module, plan: ModulePlan) -> None:
    """Makes the first forward pass of a split layer fail if a parameter was added after the split.

    For example, a LoRA adapter added by peft would see only a part of its input or output.
    """

    def check(module: nn.Module, inputs: object) -> None:
        if is_compiling():
            return
        added.remove()
        for own, parameter in root.get_submodule(plan.name).named_parameters():
            if not isinstance(parameter, DTensor):
                raise RuntimeError(
                    f"{plan.name}.{own}: was added after {plan.name} was split over tp; add "
                    "adapters such as LoRA before tensor_parallelize, with rules for their layers"
                )

    added = plan.module.register_forward_pre_hook(check)


def plan_modules(module: nn.Module, rules: Rules, tp: int) -> list[ModulePlan]:
    """Returns a plan for each module that is not tensor-parallel yet."""
    styles = _styles_by_name(module, rules)
    plans = []
    for name, each in module.named_modules():
        is_split = any(isinstance(p, DTensor) for p in each._parameters.values())
        if is_split or isinstance(each, ParallelModule):
            continue
        parent = module.get_submodule(name.rpartition(".")[0])
        whole = dict.fromkeys(each._parameters)
        replicated = Replicated if whole else None
        plan = ModulePlan(name, each, parent, tp, styles.get(name), whole, replicated)
        _choose_split(plan, styles)
        plans.append(plan)
    return plans


def _styles_by_name(module: nn.Module, rules: Rules) -> dict[str, Style]:
    """Returns the style of each module that a rule matches."""
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, Style] = {}
    patterns: dict[str, str] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, str) and rule not in WORDS:
            words = f"unknown style {rule!r}; use one of {', '.join(WORDS)}"
            raise ValueError(f"rule {pattern!r}: {words}")
        found = names_matching(pattern, names)
        if not found:
            raise ValueError(
                f"rule {pattern!r}: matches no module; the names are {', '.join(names)}"
            )
        for name in found:
            first = patterns.setdefault(name, pattern)
            if first != pattern:
                both = f"{first!r} and {pattern!r}"
                raise ValueError(f"{name}: matches two rules, {both}; keep one of them")
            styles[name] = WORDS[rule] if isinstance(rule, str) else rule
    return styles


def _choose_split(plan: ModulePlan, styles: Mapping[str, Style]) -> None:
    module = plan.module
    settings = plan.settings
    tp = plan.tp
    match plan.style:
        case None:
            if isinstance(module, nn.Embedding) or is_linear(module):
                raise plan.error(
                    f"this {type(module).__name__} has no rule; add one, for example "
                    '"replicate", which keeps it unsharded on every rank'
                )
        case Column() as style:
            entered = [f"{name}." for name, each in styles.items() if isinstance(each, Enter)]
            settings["is_entered"] = plan.name.startswith(tuple(entered))
            _split_columns(plan, style)
        case Row(sequence=sequence):
            _, dim = _weight_dims(plan)
            plan.check_divides(plan.weight_size(dim), "input features")
            plan.parallel_class, plan.dims["weight"] = RowParallel, dim
            settings["sequence_parallel"] = sequence
        case Vocab():
            if not isinstance(module, nn.Embedding) or module.max_norm or module.sparse:
                kind = type(module).__name__
                raise plan.error(
                    f"is a {kind}, but vocab needs nn.Embedding without max_norm and sparse; "
                    'use "replicate"'
                )
            if not shard_rows(module.num_embeddings, tp - 1, tp):
                plan.check_divides(module.num_embeddings, "ids")
            plan.parallel_class, plan.dims["weight"] = VocabParallel, 0
        case Enter(argument=argument, sequence=sequence):
            plan.parallel_class = EnterRegion
            settings |= {"argument": argument, "sequence_parallel": sequence}
        case Scatter(argument=argument):
            plan.parallel_class, settings["argument"] = ScatterSequence, argument
        case SplitExperts():
            count = plan.count("num_experts", module)
            plan.check_divides(count, "experts")
            plan.parallel_class = ConvertedExperts
            plan.dims = dict.fromkeys(plan.dims, 0)
            # Hugging Face models read this attribute.
            settings |= {"count": count, "_is_expert_parallel": True}
            plan.counts[module, "num_experts"] = count // tp
        case Divide(attributes=attributes, shared=shared):
            for name in attributes:
                count = plan.count(name, module)
                if name not in shared or tp % count:
                    plan.check_divides(count, name)
                plan.counts[module, name] = max(count // tp, 1)
        case Replicate() as style:
            settings |= vars(style)


def _split_columns(plan: ModulePlan, style: Column) -> None:
    """Plans the split of a column-parallel layer, by units or as in [Note: packed weights]."""
    out_dim, in_dim = _weight_dims(plan)
    features = plan.weight_size(out_dim)
    named = style.heads or style.unit
    counted = plan.count(named, plan.parent) if named else 1
    units = counted if style.heads else features // counted
    width = features // units
    parts = style.parts
    parts = (units // parts,) * parts if isinstance(parts, int) else parts
    sizes = [plan.count(each, plan.parent) if isinstance(each, str) else each for each in parts]
    if sum(sizes) * width != features:
        raise plan.error(
            f"{features} output features do not match parts of {sizes} units of {width} features "
            "each; correct parts, unit or heads of the rule"
        )
    fewest = min(sizes)
    is_shared = style.shared is not None and plan.tp > fewest and plan.tp % fewest == 0
    if len(sizes) == 1 and not is_shared:
        if named or not style.gather_output:
            what = f"heads (output features / {style.unit})" if style.unit else "output features"
            plan.check_divides(units, style.heads or what)
        plan.parallel_class = ColumnParallel
        plan.dims = dict.fromkeys(plan.dims, 0)
        plan.dims["weight"] = out_dim
        plan.settings |= {"features": features, "gather_output": style.gather_output}
        return
    plan.check_divides(plan.weight_size(in_dim), "input features")
    for size in sizes:
        if plan.tp % size:
            plan.check_divides(size, f"units in one of the parts {sizes}")
    plan.parallel_class, plan.dims["weight"] = PackedColumnParallel, in_dim
    plan.settings["packed"] = [(size * width, min(size, plan.tp)) for size in sizes]
    if style.shared is not None and fewest % plan.tp:
        queries = plan.count(style.shared, plan.parent) * fewest
        plan.check_divides(queries, "query heads")
        plan.counts[plan.parent, style.shared] = queries // plan.tp


def _weight_dims(plan: ModulePlan) -> tuple[int, int]:
    """Returns the dim of the weight's output features and that of its input features."""
    if not is_linear(plan.module):
        kind = type(plan.module).__name__
        raise plan.error(
            f"is a {kind}, but column and row need nn.Linear or Conv1D; use another style"
        )
    return (1, 0) if is_conv1d(plan.module) else (0, 1)


def split_dims(plans: Sequence[ModulePlan]) -> dict[nn.Parameter, int | None]:
    """Returns the sharded dim of every parameter.

    Raises ValueError if rules split a tied parameter along different dims.
    """
    dims: dict[nn.Parameter, int | None] = {}
    for plan in sorted(plans, key=lambda plan: plan.style is None):
        for name, dim in plan.dims.items():
            parameter = plan.module._parameters[name]
            if parameter is not None and dims.setdefault(parameter, dim) != dim and plan.style:
                raise ValueError(
                    f"{plan.name}.{name}: tied to a parameter that another rule splits along dim "
                    f"{dims[parameter]} instead of {dim}; give both modules rules that agree, "
                    "such as vocab and column"
                )
    return dims


def _set_count(owner: Any, attribute: str, count: int) -> None:
    """Sets a count of a module, or of its config after giving the module its own copy."""
    name, _, of_config = attribute.partition(".")
    if of_config:
        config = copy.copy(getattr(owner, name))
        setattr(owner, name, config)
        owner = config
        name = of_config
    setattr(owner, name, count)

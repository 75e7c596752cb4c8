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

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallel3d.convert.forms import EnterForm, ReplicatedForm, ScatterForm, reform
from parallel3d.convert.plan import plan_modules, split_dims
from parallel3d.convert.rules import Rules
from parallel3d.layers.collectives import all_reduce_max
from parallel3d.mesh import Axis
from parallel3d.row_split import shard_rows


def tensor_parallelize(module: nn.Module, mesh: DeviceMesh, rules: Rules) -> nn.Module:
    """Splits `module` over tp in place, as the table `rules` says, and returns it. `mesh` is the tp axis, or has one of
    that name. Every rank calls it with the same weights, on any device (on the meta device nothing is compared).

    Call it before `fully_shard` and before the optimizer is built. Dropout of whole activations needs the same random
    state on all tp ranks. Modules that are tensor-parallel already stay as they are.

    Raises ValueError, with the module as it was: a pattern that matches nothing, a module that two rules match, a
    linear or an embedding that none does, a size that tp does not divide, weights that differ between the ranks.
    """
    tp = mesh if mesh.ndim == 1 else mesh["tp"]
    axis = Axis.of(tp)
    plans = plan_modules(module, rules, axis.size)
    dims = split_dims(plans)
    if axis.size == 1:
        return module
    _refuse_different_weights(module, tp, axis)
    placed = {parameter: _on_axis(parameter, dim, tp, axis) for parameter, dim in dims.items()}  # tied ones stay tied
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
    return module


def _refuse_different_weights(module: nn.Module, tp: DeviceMesh, axis: Axis) -> None:
    """Raises ValueError where the ranks start from different weights: their parts would be of several models."""
    named = [(name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor) and not p.is_meta]
    if not named:
        return
    sums = torch.stack([p.detach().double().sum() for _, p in named]).to(tp.device_type).nan_to_num()
    largest, smallest = all_reduce_max(torch.stack((sums, -sums)), axis)
    for (name, _), differs in zip(named, (largest != -smallest).tolist(), strict=True):
        if differs:
            raise ValueError(
                f"{name}: starts from other values on another tp rank; load the same checkpoint on every rank, or call "
                f"torch.manual_seed(0) before the model is built"
            )


def _on_axis(parameter: nn.Parameter, dim: int | None, tp: DeviceMesh, axis: Axis) -> nn.Parameter:
    """Returns this rank's part of a parameter as a DTensor that is split in `dim`, or whole on every rank."""
    full = local = parameter.detach()
    placement: Placement = Replicate() if dim is None else Shard(dim)
    if dim is not None:
        rows = shard_rows(full.shape[dim], axis.rank, axis.size)
        local = full.narrow(dim, rows.start, len(rows)).clone()
    laid = DTensor.from_local(local, tp, [placement], run_check=False, shape=full.shape, stride=full.stride())
    return nn.Parameter(laid, requires_grad=parameter.requires_grad)

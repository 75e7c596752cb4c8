"""What every layer here shares: parameters that are DTensors on the tp axis, computed with as plain tensors.

A parameter is laid over the tp axis at rest, so that `fully_shard` composes with it and a state dict knows the global
tensor; but no DTensor takes part in arithmetic, because its dispatch costs more than a small layer's work. The layers'
autograd functions take the parameter itself, compute with `local_tensor(parameter)`, and give its gradient back by
`accumulate_or_return`.

[Note: fused gradients] By default a layer's gradient goes through autograd like any other. Where the trainer sets
`fused_gradients`, the backward pass adds it to `.grad` in place, or to `.main_grad` where there is one, usually in
float32 (`main_grad`), with no copy of the weight's size per microbatch (Megatron's gradient accumulation fusion), and a
gradient that is partial over tp stays so until `training.update` sums all of them in one collective a step.
Autograd's hooks on the parameter do not fire then.
Under `torch.compile` gradients always go through autograd; what is left partial is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d.layers.collectives import all_reduce
from parallel3d.layers.deferral import DelayedGradients
from parallel3d.layers.main_grad import accumulated_gradient, add_product, in_gradient_dtype
from parallel3d.layers.placement import LayerTp, Placement
from parallel3d.layers.regions import copy_to_region
from parallel3d.mesh import Axis
from parallel3d.row_split import shard_rows

Initializer = Callable[[Tensor, torch.Generator | None], object]


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter's global shape, the dim that tp splits (None: every rank has it whole), and how it starts."""

    shape: tuple[int, ...]
    dim: int | None
    init: Initializer
    partial_gradient: bool = False  # each tp rank computes a summand of the gradient (norms under sequence parallelism)
    uneven: bool = False  # the last rank may have fewer rows: a vocabulary

    def local_part(self, full: Tensor, axis: Axis) -> Tensor:
        """Returns this tp rank's part of the global tensor, a view: the rows of `shards.shard_rows`."""
        if self.dim is None:
            return full
        rows = shard_rows(self.shape[self.dim], axis.rank, axis.size)
        return full.narrow(self.dim, rows.start, len(rows))

    def divides(self, n: int) -> bool:
        """Whether every one of n ranks gets a part."""
        if self.dim is None:
            return True
        size = self.shape[self.dim]
        return len(shard_rows(size, n - 1, n)) > 0 if self.uneven else size % n == 0


class ParallelModule(nn.Module):
    """Base of the layers. `tp` is the tensor-parallel axis, or a `Placement` that says more than the axis; None means
    one device and no communication."""

    def __init__(self, tp: LayerTp) -> None:
        super().__init__()
        self.placement = Placement.of(tp)
        self.tp, self.sequence_parallel = self.placement.tp, self.placement.sequence_parallel
        self.axis = Axis.of(self.tp)
        self.fused_gradients = False
        self.delayed: DelayedGradients | None = None  # where a schedule splits the backward (`deferral`)
        self.specs: dict[str, ParameterSpec] = {}

    def add_parameter(self, name: str, spec: ParameterSpec | None) -> None:
        """Registers a parameter with its initial values, drawn whole from the default generator and then cut: equal
        seeds on all ranks give the same global tensor for any tp. On the meta device nothing is drawn. Without a spec
        the name is registered as None, as torch does for a bias that a layer does not have.

        Raises ValueError where tp does not divide the dim that is split.
        """
        if spec is None:
            self.register_parameter(name, None)
            return
        n = self.axis.size
        if spec.dim is not None and not spec.divides(n):
            raise ValueError(
                f"{type(self).__name__}.{name} {list(spec.shape)}: dim {spec.dim} of size {spec.shape[spec.dim]} "
                f"cannot be split over tp = {n}; a multiple of {n} would do"
            )
        full = torch.empty(spec.shape, device=self.placement.device, dtype=self.placement.dtype)
        if not full.is_meta:
            with torch.no_grad():
                spec.init(full, None)
        local = spec.local_part(full, self.axis).clone()
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(self.on_axis(local, spec, full)))

    def on_axis(self, local: Tensor, spec: ParameterSpec, full: Tensor) -> Tensor:
        """Returns this rank's part of `full` as a DTensor on the tp axis, or as it is on one rank."""
        if self.tp is None or self.tp.size() == 1:
            return local
        shape, stride = full.shape, full.stride()
        placements = [Replicate() if spec.dim is None else Shard(spec.dim)]
        return DTensor.from_local(local, self.tp, placements, run_check=False, shape=shape, stride=stride)


def set_fused_gradients(module: nn.Module, on: bool) -> None:
    """Sets for all layers below `module` whether their backwards add up gradients: [Note: fused gradients]."""
    for part in module.modules():
        if isinstance(part, ParallelModule):
            part.fused_gradients = on


def named_specs(module: nn.Module) -> Iterator[tuple[str, ParameterSpec]]:
    """Yields the global name and the spec of every parameter below `module`; of a tied one the first name alone."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        if not isinstance(part, ParallelModule):
            continue
        for name, spec in part.specs.items():
            parameter = getattr(part, name)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, spec


def local_tensor(parameter: Tensor) -> Tensor:
    """Returns the plain tensor behind a parameter or a gradient. Call it where gradients are off, as in the forward and
    the backward of an autograd function."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def accumulate_or_return(parameter: Tensor, local: Tensor, *, fused: bool) -> Tensor | None:
    """Returns what a backward pass returns for `parameter`, whose local gradient is `local`: None where gradients are
    fused, after adding it to the total; else the gradient in the parameter's own form."""
    if not fused:
        return like_parameter(parameter, local)
    total = accumulated_gradient(parameter)
    if total is None:
        parameter.grad = like_parameter(parameter, in_gradient_dtype(parameter, local))
    else:
        total.add_(local)
    return None


def accumulate_or_return_product(
    weight: Tensor, grad_out: Tensor, x: Tensor, *, fused: bool, delayed: DelayedGradients | None = None
) -> Tensor | None:
    """Does `accumulate_or_return` for a weight [out, in] whose gradient is grad_out^T x, of [tokens, out] and
    [tokens, in]: where gradients are fused, the matrix multiplication itself adds the product, now or delayed."""
    # What is delayed must not keep the graph: as a saved tensor x is a view of one that knows where it comes from.
    kept = grad_out.detach(), x.detach()
    if fused and delayed and delayed.delay(lambda: accumulate_or_return_product(weight, *kept, fused=True)):
        return None
    if fused and (total := accumulated_gradient(weight)) is not None:
        add_product(total, grad_out, x)
        return None
    return accumulate_or_return(weight, grad_out.t().mm(x), fused=fused)


def accumulate_or_return_rows(
    parameter: Tensor, rows: slice, part: Tensor, axis: Axis, *, fused: bool
) -> Tensor | None:
    """Does `accumulate_or_return` for a replicated parameter of which this rank used `rows` alone: the gradient is
    partial, and stays so where gradients are fused; else it is summed over the axis."""
    if fused and (total := accumulated_gradient(parameter)) is not None:
        total[rows].add_(part)
        return None
    whole = torch.zeros_like(local_tensor(parameter))
    whole[rows] = part
    return accumulate_or_return(parameter, whole if fused else all_reduce(whole, axis), fused=fused)


def replicated(parameter: Tensor, module: ParallelModule, name: str) -> Tensor:
    """Returns a replicated parameter as a plain tensor for autograd. Backward: its gradient, summed over tp where it is
    partial (at once, or left to the end of the step: [Note: fused gradients])."""
    if not isinstance(parameter, DTensor):
        return parameter
    if is_compiling():
        return traced(parameter, module, name)
    partial = module.specs[name].partial_gradient
    result: Tensor = _Replicated.apply(parameter, module.axis if partial else None, module.fused_gradients)
    return result


def traced(parameter: Tensor, module: ParallelModule, name: str) -> Tensor:
    """Returns this rank's part of a parameter as `torch.compile` can follow it: by torch's own conversion, whose
    gradient is the parameter's. A partial gradient is summed as `replicated` does."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if module.specs[name].partial_gradient and not module.fused_gradients:
        local = copy_to_region(local, module.axis)
    return local


class _Replicated(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sum_over: Axis | None, fused: bool) -> Tensor:
        ctx.parameter, ctx.sum_over, ctx.fused = parameter, sum_over, fused
        local = local_tensor(parameter)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.sum_over is not None and not ctx.fused:
            grad = all_reduce(grad.clone(), ctx.sum_over)  # cloned: others may hold the gradient, too
        return accumulate_or_return(ctx.parameter, grad, fused=ctx.fused), None, None


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """Returns `local`, of the shape of this rank's part, in the form of `parameter`: as a DTensor with the same layout,
    or as it is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

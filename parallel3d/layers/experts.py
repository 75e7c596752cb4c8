"""Mixture of experts in place of an MLP, with the experts divided over expert-parallel ranks.

Shapes: T tokens of a rank, D hidden, F hidden size of an expert, E experts, k experts of a token,
n = ep.

    router.weight               [E, D]         replicated
    experts.gate, experts.up    [E F / n, D]   the matrices of the rank's experts, stacked
    experts.down                [E D / n, F]   the same

No token is dropped, so every layout computes the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.config.experts import ExpertsConfig
from parallel3d.layers.collectives import outside_graph
from parallel3d.layers.dispatch import combine, dispatch, route
from parallel3d.layers.mlp import ParallelMLP, gated
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec, Pointwise
from parallel3d.layers.regions import gather_from_region, scatter_to_region
from parallel3d.layers.router import Router
from parallel3d.layers.weight_gradients import (
    DelayedGradients,
    accumulate_or_return,
    accumulated_gradient,
    add_product,
    local_tensor,
)


class ParallelExperts(ParallelModule):
    """Mixture of experts: y = sum over a token's experts of weight * expert(x).

    Each expert is a gated MLP (swiglu). A shared expert, if any, is added for every token.

    Shapes: x and y [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence parallelism.
    Without sequence parallelism, tp must divide batch * seq, because each tp rank routes its part
    of the tokens.

    Communication: with ep ranks, two all-to-alls of per_token vectors for each token in the forward
    pass, and two in the backward pass. Without sequence parallelism, an all-gather over tp in each.

    Args:
        hidden: Hidden size of the model.
        ffn_hidden: Hidden size of an expert.
        count: Number of experts. ep must divide it.
        per_token: Number of experts that compute each token.
        tp: Tensor-parallel axis or a `ParallelContext`, whose `ep` divides the experts.
        options: Further fields of `ExpertsConfig`.

    Raises:
        ValueError: ep does not divide `count`, or `per_token` exceeds it.

    Example:
        >>> layer = parallel3d.ParallelExperts(64, 128, 8, 2)
        >>> layer(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        count: int,
        per_token: int,
        *,
        tp: LayerTp = None,
        **options: Any,
    ) -> None:
        super().__init__(tp)
        config = ExpertsConfig(
            count=count,
            per_token=per_token,
            hidden=ffn_hidden,
            **options,
        )
        context = self.context
        if per_token > count:
            raise ValueError(
                f"ParallelExperts: per_token = {per_token}: must be at most count = {count}; try 2"
            )
        self.per_token = per_token
        self.router = Router(hidden, config, tp=context)
        own = replace(context, tp=context.ep or context.tp, sequence_parallel=False)
        self.experts = ExpertWeights(hidden, config, tp=own)
        self.shared: ParallelMLP | None = None
        if config.shared_hidden:
            self.shared = ParallelMLP(hidden, config.shared_hidden, tp=context)
        is_partial = self.sequence_parallel and self.axis.size > 1
        gate = ParameterSpec((1, hidden), None, context.init, partial_gradient=is_partial)
        self.add_parameter("shared_gate", gate if config.shared_gate else None)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        is_split = self.axis.size > 1 and not self.sequence_parallel
        if is_split:
            tokens = scatter_to_region(tokens, self.axis, 0)
        chosen, weights = self.router(tokens)
        y = self.experts(tokens, chosen, weights)
        if is_split:
            y = gather_from_region(y, self.axis, 0)
        y = y.view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * F.linear(x, self.replicated("shared_gate")).sigmoid()
        return y + shared


class ExpertWeights(ParallelModule):
    """The experts of a layer that this rank holds.

    Takes x [T, D], and the experts and weights [T, k] of each token. Returns the weighted sums of
    their outputs [T, D].

    Args:
        hidden: Hidden size of the model.
        config: Experts of the model.
        tp: Expert-parallel axis, or a `ParallelContext` with it as tp.
    """

    def __init__(self, hidden: int, config: ExpertsConfig, *, tp: LayerTp = None) -> None:
        super().__init__(tp)
        self.config = config
        if config.count % self.axis.size:
            raise ValueError(
                f"ParallelExperts: count = {config.count}: ep = {self.axis.size} must divide it; "
                f"try ep = 1 or count = {self.axis.size}"
            )
        self.pointwise: Pointwise = gated_in_place
        init = self.context.init
        matrix = partial(ParameterSpec, dim=0, stacked=config.count)
        wide = (config.count * config.hidden, hidden)
        self.add_parameter("gate", matrix(wide, init=init))
        self.add_parameter("up", matrix(wide, init=init))
        down = (config.count * hidden, config.hidden)
        self.add_parameter("down", matrix(down, init=self.context.row_init or init))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        k = chosen.shape[1]
        way = route(chosen, self.config.count, self.axis)
        rows = dispatch(x, k, way, self.axis)
        # Ends of the experts' rows on the device for the grouped kernel, or numbers on the host.
        counts: Sequence[int] | Tensor
        is_aligned = rows.shape[1] % 8 == self.config.hidden % 8 == 0  # as `grouped_mm` requires
        if uses_grouped(rows) and is_aligned:
            counts = way.counts.cumsum(0).int()
        else:
            counts = way.counts.tolist()
        how = (counts, self.fused_gradients, self.delayed)
        gate, up = outside_graph(_Grouped.apply, rows, how, self.gate, self.up)
        (y,) = outside_graph(_Grouped.apply, self.pointwise(gate, up), how, self.down)
        return combine(y, weights, way, self.axis)


def uses_grouped(x: Tensor) -> bool:
    """Returns True if one kernel multiplies the rows of all experts: on GPUs in bfloat16."""
    return x.is_cuda and x.dtype == torch.bfloat16


def grouped(
    x: Tensor, matrices: Tensor, counts: Sequence[int] | Tensor, total: Tensor | None = None
) -> Tensor:
    """Returns x_e M_e for the rows x_e of each expert. `matrices` is [experts, in, out].

    `counts` holds the number of rows of each expert, or a tensor with the end of its rows, which
    `grouped_mm` takes. If given, `total` is added to the result, in place.
    """
    if isinstance(counts, Tensor):
        y = F.grouped_mm(x, matrices, offs=counts)
        return y if total is None else total.add_(y)
    y = x.new_empty(len(x), matrices.shape[2]) if total is None else total
    for rows, matrix, out in zip(x.split(counts), matrices, y.split(counts), strict=True):
        if total is None:
            torch.mm(rows, matrix, out=out)
        else:
            out.addmm_(rows, matrix)
    return y


def gated_in_place(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, with a backward pass that allocates two tensors instead of three."""
    if is_compiling():
        return gated(gate, up, F.silu)
    y: Tensor = _Gated.apply(gate, up)
    return y


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        active = F.silu(gate)
        ctx.save_for_backward(gate, up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, active = ctx.saved_tensors
        d_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, grad * active


# Counts of `grouped`, True if gradients are fused, and the collector of delayed gradients.
How = tuple[Sequence[int] | Tensor, bool, DelayedGradients | None]


class _Grouped(Function):
    """y_e = x_e W_e^T for the rows of each expert and for each of several weights.

    A weight holds the matrices W_e, stacked.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How, *weights: Tensor) -> tuple[Tensor, ...]:
        locals_ = [local_tensor(weight) for weight in weights]
        ctx.save_for_backward(x, *locals_)
        ctx.weights = weights
        ctx.how = how
        shape = (len(how[0]), -1, x.shape[1])
        return tuple(grouped(x, local.view(shape).mT, how[0]) for local in locals_)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *locals_ = ctx.saved_tensors
        counts, fused, delayed = ctx.how
        grads = tuple(grad.contiguous() for grad in grads)
        dx: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for grad, local in zip(grads, locals_, strict=True):
                dx = grouped(grad, local.view(len(counts), -1, x.shape[1]), counts, dx)
        dw = []
        for weight, grad in zip(ctx.weights, grads, strict=True):
            dw.append(weight_gradient(weight, grad, x, counts, fused=fused, delayed=delayed))
        return dx, None, *dw


def weight_gradient(
    weight: Tensor,
    grad: Tensor,
    x: Tensor,
    counts: Sequence[int] | Tensor,
    *,
    fused: bool,
    delayed: DelayedGradients | None = None,
) -> Tensor | None:
    """Returns or accumulates the gradients grad_e^T x_e, as `accumulate_or_return_product` does.

    An expert without rows has a gradient of zeros.
    """
    if not weight.requires_grad:
        return None
    if delayed is not None:
        work = partial(weight_gradient, weight, grad, x.detach(), counts, fused=True)
        if delayed.delay(work):
            return None
    if isinstance(counts, Tensor):
        products = F.grouped_mm(grad.mT, x, offs=counts).flatten(0, 1)
        return accumulate_or_return(weight, products, fused=fused)
    total = accumulated_gradient(weight) if fused else None
    is_new = total is None
    if total is None:
        total = torch.zeros_like(local_tensor(weight.detach()))
    each = total.view(len(counts), -1, x.shape[1])
    for sum_, rows, inputs in zip(each, grad.split(counts), x.split(counts), strict=True):
        if len(rows):
            add_product(sum_, rows, inputs)
    return accumulate_or_return(weight, total, fused=fused) if is_new else None

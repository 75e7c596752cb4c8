"""Weight gradients that are delayed: the second half of a backward that a zero-bubble schedule splits (Qi et al. 2023,
arXiv 2401.10241).

A layer's backward computes the gradient of its input first, for which the stage before waits, and then the gradient of
its weight, for which nobody waits. Before the second product it asks `delay_if_split(work)`: where the runtime runs the
first half alone, the work is kept, with the two tensors that it multiplies, and is done in the second half; else the
layer does it at once. So no forward is computed again, the graph and all other activations are freed in the first half,
and activation recompute happens once. The gradients of all other parameters (a norm's weight, an embedding, a module of
another library) are computed in the first half.

The switch is the process's and no thread's: on a GPU autograd runs a backward in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d.layers.main_grad import accumulated_gradient, add_product
from parallel3d.torch_private import is_compiled

Work = Callable[[], object]

_put_off: list[Work] | None = None


@contextmanager
def deferring() -> Iterator[list[Work]]:
    """Collects the weight gradients of the backwards in this block, to be called once each, in order."""
    global _put_off
    before, _put_off = _put_off, []
    try:
        yield _put_off
    finally:
        _put_off = before


def delay_if_split(work: Work) -> bool:
    """Whether the work was put off; else the caller does it."""
    if _put_off is None:
        return False
    _put_off.append(work)
    return True


def make_linears_deferrable(module: nn.Module) -> None:
    """Lets the `nn.Linear`s below a module put off their weights' gradients. It changes no result and no name. What is
    compiled stays as it is: its backward is one piece, which is done in the first half."""
    if is_compiled(module):
        return
    if type(module) is nn.Linear and "forward" not in vars(module):
        module.forward = _Deferrable(module)  # type: ignore[assignment, method-assign]  # this instance's own
    for child in module.children():
        make_linears_deferrable(child)


class _Deferrable:
    """The forward of a linear layer. With a weight that is no plain leaf, or under autocast, it is torch's own."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        is_plain = weight.is_leaf and weight.requires_grad and not isinstance(weight, DTensor)
        if not is_plain or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        y: Tensor = _Linear.apply(x, weight, bias)
        return y


class _Linear(Function):
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias = weight, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        # Detached, so that what is put off does not keep the graph.
        flat_grad, flat_x = grad.detach().reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])
        grad_bias = flat_grad.sum(0) if ctx.has_bias else None

        def add() -> None:
            total = accumulated_gradient(weight)
            if total is None:
                weight.grad = flat_grad.t() @ flat_x
            else:
                add_product(total, flat_grad, flat_x)

        return grad_x, None if delay_if_split(add) else flat_grad.t() @ flat_x, grad_bias

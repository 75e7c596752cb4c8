"""Weight gradients that are delayed: the second half of a backward that a zero-bubble schedule splits (Qi et al. 2023,
arXiv 2401.10241).

A layer's backward computes the gradient of its input first, for which the stage before waits, and then the gradient of
its weight, for which nobody waits. Before the second product it asks `DelayedGradients.delay`: where the runtime runs
the first half alone, the work is kept, with the two tensors that it multiplies, and is done in the second half; else
the layer does it at once. So no forward is computed again, the graph and all other activations are freed in the first
half, and activation recompute happens once. The gradients of all other parameters (a norm's weight, an embedding, a
module of another library) are computed in the first half.
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

from parallel3d.layers.main_grad import accumulated_gradient, add_product, in_gradient_dtype
from parallel3d.torch_private import is_compiled

Work = Callable[[], object]


class DelayedGradients:
    """The weight gradients that the layers of one stage delay. Its layers share it, so that every thread in which
    autograd runs their backward sees it."""

    def __init__(self) -> None:
        self._works: list[Work] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Work]]:
        """Collects the weight gradients of the backwards in this block, to be called once each, in order."""
        before, self._works = self._works, []
        try:
            yield self._works
        finally:
            self._works = before

    def delay(self, work: Work) -> bool:
        """Takes the work of a layer's second half and returns True, or returns False: the layer then does it at
        once."""
        if self._works is None:
            return False
        self._works.append(work)
        return True


def delay_weight_gradients(module: nn.Module) -> DelayedGradients:
    """Lets the layers below a module, `nn.Linear`s among them, delay their weights' gradients, and returns what
    collects them. It changes no result and no name. What is compiled stays as it is: its backward is one piece, which
    is done in the first half. A second call returns the same object."""
    layers = [part for part in _eager_modules(module) if hasattr(part, "delayed") or type(part) is nn.Linear]
    known = (found for part in layers if isinstance(found := getattr(part, "delayed", None), DelayedGradients))
    delayed = next(known, None) or DelayedGradients()
    for part in layers:
        if type(part) is nn.Linear and "forward" not in vars(part):
            part.forward = _DelayingLinear(part, delayed)  # type: ignore[assignment, method-assign]
        part.delayed = delayed  # type: ignore[assignment]
    return delayed


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and those below it, but for compiled ones and all that is in them."""
    if not is_compiled(module):
        yield module
        for child in module.children():
            yield from _eager_modules(child)


class _DelayingLinear:
    """The forward of a linear layer. With a weight that is not a plain leaf, or under autocast, it is torch's own."""

    def __init__(self, linear: nn.Linear, delayed: DelayedGradients) -> None:
        self.linear, self.delayed = linear, delayed

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        is_plain = weight.is_leaf and weight.requires_grad and not isinstance(weight, DTensor)
        if not is_plain or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        y: Tensor = _Linear.apply(x, weight, bias, self.delayed)
        return y


class _Linear(Function):
    """A linear layer whose weight's gradient may be delayed: x [..., in], weight [out, in], bias [out] -> [...,
    out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, delayed: DelayedGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, ctx.delayed = weight, bias is not None, delayed
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        # Detached, so that what is delayed does not keep the graph.
        flat_grad, flat_x = grad.detach().reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])
        grad_bias = flat_grad.sum(0) if ctx.has_bias else None

        def add() -> None:
            total = accumulated_gradient(weight)
            if total is None:
                weight.grad = in_gradient_dtype(weight, flat_grad.t() @ flat_x)
            else:
                add_product(total, flat_grad, flat_x)

        return grad_x, None if ctx.delayed.delay(add) else flat_grad.t() @ flat_x, grad_bias, None

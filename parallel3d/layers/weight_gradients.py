"""Accumulates parameter gradients in place and delays the computation of weight gradients.

The autograd functions of the layers take the parameter itself, a DTensor on the tp axis. They
compute with `local_tensor(parameter)` and pass its gradient to `accumulate_or_return`.

[Note: fused gradients] By default, and always in compiled graphs, gradients pass through autograd.
If the trainer sets `fused_gradients`, the backward pass adds them to `.grad` in place, without a
copy of the weight's size per microbatch (Megatron-LM's gradient accumulation fusion). Gradients
that are partial over tp stay partial until `engine` reduces all of them in one collective per step.
If a parameter has a `main_grad` (Megatron-LM's name), gradients are added to that tensor. It has
the shape of the local shard and, for 16-bit parameters, usually float32. `sharding.buckets` creates
it and also adds gradients from autograd to it. Autograd hooks of a parameter with fused gradients
do not fire.

[Note: delayed gradients] A zero-bubble schedule (Qi et al. 2023, arXiv 2401.10241) splits a
backward pass. It computes input gradients first, which the previous stage waits for, and weight
gradients later. Before the matmul of a weight gradient, a layer calls `DelayedGradients.delay`. If
the runtime runs only the first half, the call stores the two tensors to multiply for the second
half. Otherwise the layer multiplies them at once. The first half frees the graph and all other
activations, so the second half recomputes nothing. All other gradients, such as those of norms and
embeddings, belong to the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import ONE_RANK, Axis
from parallel3d.torch_private import local_of

Work = Callable[[], object]


class DelayedGradients:
    """Collects the weight gradients that the layers of one stage defer.

    The layers hold one shared instance, so that every autograd thread sees it.
    """

    def __init__(self) -> None:
        self._works: list[Work] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Work]]:
        """Context manager that yields a list of deferred work. Call each item once, in order."""
        before = self._works
        self._works = []
        try:
            yield self._works
        finally:
            self._works = before

    def delay(self, work: Work) -> bool:
        """Defers the work if gradients are being collected. Otherwise returns False: do it now."""
        if self._works is None:
            return False
        self._works.append(work)
        return True


def local_tensor(parameter: Tensor) -> Tensor:
    """Returns the local tensor of a parameter or gradient, without autograd."""
    return local_of(parameter) if isinstance(parameter, DTensor) else parameter


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor
) -> DTensor:
    """Returns the shard `local` as a DTensor with the shape and strides of `whole`."""
    shape = whole.shape
    stride = whole.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """Returns `local` as a DTensor like `parameter`, or unchanged if that is a plain tensor."""
    if not isinstance(parameter, DTensor):
        return local
    return as_dtensor(local, parameter.device_mesh, parameter.placements, parameter)


def accumulated_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the local tensor of `main_grad` or `.grad`, or None if there is no gradient yet."""
    total: Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return None if total is None else local_tensor(total)


def add_product(total: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """Adds grad_out^T x to `total` [out, in], from grad_out [tokens, out] and x [tokens, in].

    `total` may have a wider dtype. If `has_wide_product`, the matmul accumulates into float32
    directly, without rounding. Otherwise its result is first rounded to the dtype of its inputs.
    """
    if total.dtype == x.dtype:
        total.addmm_(grad_out.t(), x)
    elif total.is_cuda and total.dtype == torch.float32 and has_wide_product(x.device, x.dtype):
        torch.addmm(total, grad_out.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.add_(grad_out.t().mm(x))


@cache
def has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if a GPU can add a matmul of `dtype` inputs to a float32 total.

    Tries one, because the torch version does not tell. AMD GPUs lack the operator, and some torch
    versions reject a float32 total.
    """
    total = torch.zeros(16, 16, device=device)
    factor = total.to(dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def accumulate_or_return(
    parameter: Tensor,
    local: Tensor,
    *,
    fused: bool,
    rows: slice | None = None,
    axis: Axis = ONE_RANK,
) -> Tensor | None:
    """Returns the value that a backward pass returns for `parameter`, given its local gradient.

    With `fused`, adds the gradient to the accumulated one and returns None. Otherwise returns it as
    a DTensor or plain tensor, like the parameter. `rows` are the rows that this rank used of a
    replicated parameter. Their gradient is partial. Without `fused`, it is summed over `axis`. A
    frozen parameter gets no gradient.
    """
    if not parameter.requires_grad:
        return None
    total = accumulated_gradient(parameter) if fused else None
    if total is not None:
        (total if rows is None else total[rows]).add_(local)
        return None
    if rows is not None:
        whole = torch.zeros_like(local_tensor(parameter))
        whole[rows] = local
        local = whole if fused else all_reduce(whole, axis)
    if not fused:
        return like_parameter(parameter, local)
    # `fully_shard` sets grad_dtype, the dtype of accumulation, from torch 2.15 on. None allows any.
    parameter.grad = like_parameter(parameter, local.to(parameter.grad_dtype or local.dtype))
    return None


def accumulate_or_return_product(
    weight: Tensor,
    grad_out: Tensor,
    x: Tensor,
    *,
    fused: bool,
    delayed: DelayedGradients | None = None,
) -> Tensor | None:
    """Calls `accumulate_or_return` with the gradient grad_out^T x of a weight [out, in].

    Shapes: grad_out [tokens, out], x [tokens, in]. With `fused`, the matmul accumulates directly.
    `delayed` may defer the work, which is then always fused.
    """
    if not weight.requires_grad:
        return None
    if delayed is not None:
        # Deferred work must not keep the graph alive. A saved tensor refers to its graph, so detach
        # it.
        kept = x.detach()
        work = partial(accumulate_or_return_product, weight, grad_out, kept, fused=True)
        if delayed.delay(work):
            return None
    total = accumulated_gradient(weight) if fused else None
    if total is not None:
        add_product(total, grad_out, x)
        return None
    return accumulate_or_return(weight, grad_out.t().mm(x), fused=fused)

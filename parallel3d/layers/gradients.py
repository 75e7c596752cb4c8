"""Where a backward puts the gradient of a parameter, and when.

Parameters are DTensors on the tp axis (`layers.parameter`). The layers' autograd functions take the
parameter itself, compute with `local_tensor(parameter)`, and give its gradient back by
`accumulate_or_return`.

[Note: fused gradients] By default a layer's gradient goes through autograd like any other, and
under `torch.compile` always. Where the trainer sets `fused_gradients`, the backward pass adds it to
`.grad` in place, with no copy of the weight's size per microbatch (Megatron's gradient accumulation
fusion), and a gradient that is partial over tp stays so until `engine` sums all of them in
one collective a step. Where a parameter has a `main_grad` (Megatron's name) the backward adds to
that instead: a plain tensor of the shape of this rank's part, usually float32 where the parameter
has 16 bits. It belongs to whoever set it (`sharding.buckets`), who also moves there what autograd
gives other parameters. Autograd's hooks on the parameter do not fire then.

[Note: delayed gradients] A zero-bubble schedule (Qi et al. 2023, arXiv 2401.10241) splits a
backward: it computes the gradient of a layer's input first, for which the stage before waits, and
that of its weight later, for which nobody waits. Before the second product a layer asks
`DelayedGradients.delay`: where the runtime runs the first half alone, the work is kept, with the
two tensors that it multiplies, and is done in the second half; else the layer does it at once. So
no forward is computed again, the graph and all other activations are freed in the first half, and
activation recompute happens once. All other gradients (a norm's, an embedding's) are computed in
the first half.
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

Work = Callable[[], object]


class DelayedGradients:
    """The weight gradients that the layers of one stage delay. Its layers share it, so that every
    thread in which autograd runs their backward sees it."""

    def __init__(self) -> None:
        self._works: list[Work] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Work]]:
        """Collects the weight gradients of the backwards in this block, to be called once each, in
        order."""
        before = self._works
        self._works = []
        try:
            yield self._works
        finally:
            self._works = before

    def delay(self, work: Work) -> bool:
        """Takes the work of a layer's second half, or returns False: the layer then does it at
        once."""
        if self._works is None:
            return False
        self._works.append(work)
        return True


def local_tensor(parameter: Tensor) -> Tensor:
    """Returns the plain tensor behind a parameter or a gradient. Call it where gradients are off,
    as in the forward and the backward of an autograd function."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor
) -> DTensor:
    """Returns a rank's part `local` as the DTensor of the shape and strides of `whole`. Nothing is
    sent."""
    shape = whole.shape
    stride = whole.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def like_parameter(parameter: Tensor, local: Tensor) -> Tensor:
    """Returns `local`, of the shape of this rank's part, in the form of `parameter`: as a DTensor
    with the same layout, or as it is."""
    if not isinstance(parameter, DTensor):
        return local
    return as_dtensor(local, parameter.device_mesh, parameter.placements, parameter)


def accumulated_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the plain tensor that holds the gradient so far; None before the first backward."""
    total: Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return None if total is None else local_tensor(total)


def add_product(total: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """Adds grad_out^T x, of [tokens, out] and [tokens, in], to `total` [out, in], which may be
    wider: on an NVIDIA GPU by the product itself, which sums in float32, so that nothing is rounded
    or written twice. Other devices have no such product, and round it to the dtype of its factors
    first."""
    if total.dtype == x.dtype:
        total.addmm_(grad_out.t(), x)
    elif total.is_cuda and total.dtype == torch.float32 and has_wide_product(x.device, x.dtype):
        torch.addmm(total, grad_out.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.add_(grad_out.t().mm(x))


@cache
def has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a GPU's matrix product of factors of `dtype` can be added to a float32 total.
    It tries one, once, because no version number tells: AMD's GPUs have none, and a torch may know
    the operator and refuse such a total."""
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
    """Returns what a backward pass returns for `parameter`, whose local gradient is `local`: None
    where gradients are fused, after adding it to the total; else the gradient in the parameter's
    own form. If this rank used some `rows` of a replicated parameter, `local` is theirs: the
    gradient is partial, stays so where gradients are fused, and else is summed over `axis`. A
    frozen parameter gets no gradient."""
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
    # The dtype in which gradients add up, which `fully_shard` sets from torch 2.15 on; None takes
    # any dtype.
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
    """Does `accumulate_or_return` for a weight [out, in] whose gradient is grad_out^T x, of
    [tokens, out] and [tokens, in]: where gradients are fused, the matrix multiplication itself adds
    the product. What is `delayed` is added later."""
    if not weight.requires_grad:
        return None
    if delayed is not None:
        # What is delayed must not keep the graph: as a saved tensor x is a view of one that knows
        # where it comes from.
        kept = x.detach()
        work = partial(accumulate_or_return_product, weight, grad_out, kept, fused=True)
        if delayed.delay(work):
            return None
    total = accumulated_gradient(weight) if fused else None
    if total is not None:
        add_product(total, grad_out, x)
        return None
    return accumulate_or_return(weight, grad_out.t().mm(x), fused=fused)

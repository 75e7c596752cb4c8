"""The tensor to which a fused backward adds a gradient.

`parameter.main_grad` (Megatron's name) is a plain tensor of the shape of this rank's part, usually float32 where the
parameter has 16 bits: a fused backward adds to it, in its precision, and leaves `.grad` alone. It belongs to whoever
set it (`sharding.buckets`), who also moves there what autograd gives other parameters. Without it `.grad` is added to.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def accumulated_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the plain tensor that holds the gradient so far; None before the first backward."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def in_gradient_dtype(parameter: Tensor, local: Tensor) -> Tensor:
    """Returns `local`, a first gradient of `parameter`, in the dtype in which the parameter adds its gradients up. From
    torch 2.15 on `fully_shard` sets that dtype as `grad_dtype`; None takes any dtype."""
    return local.to(parameter.grad_dtype or local.dtype)


def add_product(total: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """Adds grad_out^T x, of [tokens, out] and [tokens, in], to `total` [out, in], which may be wider."""
    if total.dtype == x.dtype:
        total.addmm_(grad_out.t(), x)
    else:
        total.add_(grad_out.t().mm(x))

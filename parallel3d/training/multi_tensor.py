"""Arithmetic on many tensors in a few kernels: the one place that calls torch's `_foreach` functions.

They have no public name. `torch.nn.utils` has public functions on top of them, which do not do: `get_total_norm` rounds
each norm to the tensor's own dtype, eight bits of bf16, and `clip_grads_with_norm_` never multiplies by more than 1. A
plain loop costs a GPU a launch for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies each, in place."""
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each, added up and given in `dtype`."""
    return list(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))

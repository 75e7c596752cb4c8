"""Normalization layers with replicated weights.

x and y are [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence parallelism. In the
latter case tp ranks see different tokens, so the gradients of weight and bias are summed over tp.
The same holds for an RMSNorm with `over_heads`, whose ranks normalize different heads [..., heads /
tp, head_dim] (q/k norm).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.layers.parameter import (
    LayerTp,
    ParallelModule,
    ParameterSpec,
    Pointwise,
    ones,
    zeros,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


class RMSNorm(ParallelModule, nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467).

    Args:
        hidden: Size of the last dim of x.
        eps: Added to the mean square.
        tp: Tensor-parallel axis or a `ParallelContext`.
        over_heads: If True, x holds this rank's heads [..., heads / tp, head_dim] and the weight's
            gradient is summed over tp.

    Example:
        >>> norm = parallel3d.RMSNorm(64, eps=1e-6)
        >>> norm(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        tp: LayerTp = None,
        over_heads: bool = False,
    ) -> None:
        super().__init__(tp)
        self.eps = eps
        self.normalized_shape = (hidden,)
        self.elementwise_affine = True
        self.pointwise: Pointwise = rms_norm
        partial = self.sequence_parallel or over_heads
        self.add_parameter("weight", ParameterSpec((hidden,), None, ones, partial_gradient=partial))

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(x, self.replicated("weight"), self.eps)


class LayerNorm(ParallelModule, nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016, arXiv 1607.06450).

    Args:
        hidden: Size of the last dim of x.
        eps: Added to the variance.
        bias: If False, the layer has only a weight.
        tp: Tensor-parallel axis or a `ParallelContext`.

    Example:
        >>> norm = parallel3d.LayerNorm(64, bias=False)
        >>> norm(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        tp: LayerTp = None,
    ) -> None:
        super().__init__(tp)
        self.eps = eps
        self.normalized_shape = (hidden,)
        self.elementwise_affine = True
        self.pointwise: Pointwise = layer_norm
        partial = self.sequence_parallel
        spec = ParameterSpec((hidden,), None, ones, partial_gradient=partial)
        self.add_parameter("weight", spec)
        self.add_parameter("bias", replace(spec, init=zeros) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(x, self.replicated("weight"), self.replicated("bias"), self.eps)

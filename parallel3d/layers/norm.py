"""Normalisation. Its weight is small and whole on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.layers.init import ones
from parallel3d.layers.parameter import ParallelModule, ParameterSpec, replicated


class RMSNorm(ParallelModule):
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467).

    x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`: then each tp rank sees other
    tokens, and the weight's gradient is summed over tp.
    """

    weight: nn.Parameter

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        self.eps = eps
        spec = ParameterSpec((hidden,), None, ones, partial_gradient=sequence_parallel)
        self.add_parameter("weight", spec, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight = replicated(self.weight, self, "weight")
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

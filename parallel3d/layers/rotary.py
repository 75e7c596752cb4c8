"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form of Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from parallel3d.layers.positions import Llama3Scaling, YarnScaling


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by angles that grow with the position: dims i and i + K / 2 by position * theta^(-2i / K),
    that frequency changed by `scaling` where there is one.

    The table of angles is float32, made on first use for the longest sequence yet, and no part of a state dict.
    """

    def __init__(
        self, head_dim: int, *, theta: float = 10_000.0, scaling: Llama3Scaling | YarnScaling | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turns x [batch, seq, heads, head_dim] by its positions [batch, seq], which are below seq, and 0, 1, ... where
        they are not given. Returns the same shape and dtype."""
        cos, sin = self._angles(x)
        if positions is not None:
            cos, sin = cos[positions], sin[positions]  # [batch, seq, 1, head_dim]
        return torch.addcmul(x * cos, x.roll(self.head_dim // 2, dims=-1), sin)

    def _angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [seq, 1, head_dim] in x's dtype; sin is negative for the first half, which gets the second's."""
        length = x.shape[1]
        table = self._table
        if table is None or table[0].shape[0] < length or table[0].device != x.device or table[0].dtype != x.dtype:
            exponents = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
            frequencies, magnitude = self.theta**-exponents, 1.0
            if self.scaling is not None:
                frequencies, magnitude = self.scaling.scale(frequencies, self.theta), self.scaling.magnitude
            positions = torch.arange(length, device=x.device, dtype=torch.float32)
            angles = torch.outer(positions, frequencies).repeat(1, 2).unsqueeze(1)
            signs = torch.full((self.head_dim,), magnitude, device=x.device)
            signs[: self.head_dim // 2] *= -1.0
            table = (angles.cos() * magnitude).to(x.dtype), (angles.sin() * signs).to(x.dtype)
            if not is_compiling():  # a graph that keeps something is another graph the next time
                self._table = table
        return table[0][:length], table[1][:length]

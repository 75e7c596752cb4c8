"""Self-attention, its heads split over tp.

Shapes: B batch, S sequence, D hidden, H query heads, G key-value heads, K head dim, n = tp.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel3d.layers.init import normal
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.parameter import Initializer, ParallelModule
from parallel3d.layers.rotary import RotaryEmbedding


class ParallelAttention(ParallelModule):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`. Each tp rank computes heads / tp
    queries over kv_heads / tp keys and values. Sends what one column- and one row-parallel linear send.
    `recompute`: the attention's own intermediate results are computed again in the backward instead of kept.

    Raises ValueError where tp does not divide heads and kv_heads.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        rotary: RotaryEmbedding | None = None,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        recompute: bool = False,
        init: Initializer = normal(0.02),
        output_init: Initializer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)
        self.head_dim = hidden // heads
        self.grouped = kv_heads != heads
        self.recompute = recompute
        self.rotary = rotary

        def column(out_features: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden,
                out_features,
                tp=tp,
                sequence_parallel=sequence_parallel,
                init=init,
                device=device,
                dtype=dtype,
            )

        self._check_heads(heads, kv_heads)
        self.q = column(heads * self.head_dim)
        self.k = column(kv_heads * self.head_dim)
        self.v = column(kv_heads * self.head_dim)
        self.o = RowParallelLinear(
            heads * self.head_dim,
            hidden,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init=output_init or init,
            device=device,
            dtype=dtype,
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))  # [B, S, H / n or G / n, K]
            for part in column_parallel(x_BSD, (self.q, self.k, self.v))
        )
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.recompute and torch.is_grad_enabled():
            y = checkpoint(self._attend, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._attend(q, k, v)
        return self.o(y.flatten(-2))

    def _attend(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q_BSHK, k_BSGK, v_BSGK))
        y_BHSK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return y_BHSK.transpose(1, 2)

    def _check_heads(self, heads: int, kv_heads: int) -> None:
        n = self.axis.size
        if heads % kv_heads or heads % n or kv_heads % n:
            raise ValueError(
                f"ParallelAttention: heads = {heads}, kv_heads = {kv_heads}, tp = {n}: kv_heads must divide heads, "
                f"and tp must divide both"
            )

"""The product of attention on the heads of one rank: softmax(scale q k^T + mask) v.

Shapes: B batch, H this rank's query heads, G its key-value heads, S queries, T keys, K head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.layers.dropout import Dropout


def attend(
    q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """Returns [B, H, S, K], by torch's fastest kernel for these shapes. `causal` goes without a mask."""
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def attend_with_dropout(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    dropout: Dropout,
    key: Tensor | None,
) -> Tensor:
    """Returns [B, H, S, K], with the probabilities written out [B, H, S, T]: torch's kernels draw their dropout from
    one generator, which on tp ranks of equal seeds would drop the same elements of different heads."""
    group = q_BHSK.shape[1] // k_BGTK.shape[1]
    k, v = (part.repeat_interleave(group, dim=1) if group > 1 else part for part in (k_BGTK, v_BGTK))
    scores = q_BHSK @ k.transpose(-1, -2) * (q_BHSK.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return dropout(scores.softmax(dim=-1, dtype=wide).to(v.dtype), key) @ v

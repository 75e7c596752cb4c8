"""Calls the attention kernels that `config.attention_kernels` selects.

Shapes: B batch, S sequence, H query heads and G key/value heads of one tp rank, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.attention_kernels import (
    AttentionCall,
    AttentionDevice,
    AttentionKernel,
    attention_kernel,
)

TORCH_VERSION = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))


def device_of(device: torch.device) -> AttentionDevice:
    """Returns the device properties that kernel selection depends on.

    Fake CUDA tensors on a machine without a GPU count as those of an A100.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return AttentionDevice(device.type, torch=TORCH_VERSION)
    return AttentionDevice(
        device.type,
        capability=torch.cuda.get_device_capability(device),
        torch=TORCH_VERSION,
        cudnn=torch.backends.cudnn.version() or 0,
        is_rocm=torch.version.hip is not None,
    )


def kernel_of(q: Tensor, k: Tensor, **flags: bool) -> AttentionKernel:
    """Selects the kernel for q [B, S, H, K], k [B, S, G, K] and `flags` of `AttentionCall`."""
    call = AttentionCall(
        item_bytes=q.dtype.itemsize,
        is_bf16=q.dtype == torch.bfloat16,
        head_dim=q.shape[-1],
        is_grouped=q.shape[2] != k.shape[2],
        trains=torch.is_grad_enabled() and q.requires_grad,
        **flags,
    )
    return attention_kernel(call, device_of(q.device))


def attend(
    q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, *, causal: bool
) -> Tensor:
    """Computes attention [B, H, S, K] with the kernel that torch selects.

    `mask` is True if a query may see a key. `causal` requires mask = None.
    """
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


class Segments(NamedTuple):
    """Segments into which the tokens of a batch are divided, in order."""

    starts: Tensor  # int32 [segments + 1]. Index of each first token, then the number of tokens.
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(starts.to(device, non_blocking=True), max(lengths))


def attend_by_varlen(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    queries: Segments,
    keys: Segments,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Computes attention [B, S, H, K] with torch's variable-length kernel for CUDA.

    Each segment of queries attends to the segment of keys with the same index. If `causal`, its
    queries are the last tokens of that segment. Keys outside the window cost nothing.
    """
    # Imported lazily, because it imports the compiler.
    from torch.nn.attention.varlen import varlen_attn

    # `window` counts the query's own position, the kernel does not. -1 means no limit.
    side = -1 if window is None else window - 1
    y = varlen_attn(
        q_BSHK.flatten(0, 1),
        k_BTGK.flatten(0, 1),
        v_BTGK.flatten(0, 1),
        queries.starts,
        keys.starts,
        queries.longest,
        keys.longest,
        window_size=(side, 0 if causal else side),
        enable_gqa=q_BSHK.shape[2] != k_BTGK.shape[2],
    )
    assert isinstance(y, Tensor)  # The kernel returns a second result only on request.
    return y.unflatten(0, q_BSHK.shape[:2])

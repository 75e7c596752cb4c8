"""Attention by kernels whose memory grows with the sequence, not with its square: how each call of
the table in `config.attention_kernels` is made. Shapes: B batch, S sequence, T keys, H query heads,
G key-value heads, K head dim; all heads are those of one tp rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.attention_kernels import (
    AttentionCall,
    AttentionDevice,
    AttentionKernel,
    attention_kernel,
)
from parallel3d.layers.positions import PackedDocuments

TORCH_VERSION = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))


def device_of(device: torch.device) -> AttentionDevice:
    """Returns what the choice of a kernel depends on. Fake tensors of a GPU that is not there count
    as an A100's."""
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
    """Returns the kernel for q [B, S, H, K] and k [B, S, G, K]. The flags are those of
    `AttentionCall`."""
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
    """Returns softmax(q k^T / sqrt(K) + mask) v [B, H, S, K] by torch's fastest kernel. `causal`
    goes without a mask."""
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


def attend_by_varlen(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    documents: PackedDocuments | None,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Returns the attention [B, S, H, K] by CUDA's kernel for sequences of different lengths, which
    skips what a window hides: of `documents`, or of whole sequences where it is None. Nothing is
    copied to the GPU."""
    from torch.nn.attention.varlen import varlen_attn  # which imports the compiler

    (batch, seq, heads, _), device = q_BSHK.shape, q_BSHK.device
    if documents is None:
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * seq
        longest = seq
    else:
        starts = documents.starts
        longest = max(documents.lengths)
    # The kernel counts the keys before and after a query, and ours the query too. -1 is all of
    # them.
    side = -1 if window is None else window - 1
    y = varlen_attn(
        q_BSHK.flatten(0, 1),
        k_BSGK.flatten(0, 1),
        v_BSGK.flatten(0, 1),
        starts,
        starts,
        longest,
        longest,
        window_size=(side, 0 if causal else side),
        enable_gqa=heads != k_BSGK.shape[2],
    )
    assert isinstance(y, Tensor)  # a second result comes where it is asked for
    return y.unflatten(0, (batch, seq))


def own_mask(seq: int, *, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Returns the attention's own mask [S, S], True if a query may see a key. With `window` a query
    sees that many keys up to itself (Beltagy et al. 2020, arXiv 2004.05150; Mistral's), and if it
    is not causal, as many from itself on."""
    place = torch.arange(seq, device=device)
    distance = place.unsqueeze(1) - place
    is_near = distance.abs() < (window or seq)
    return is_near & (distance >= 0) if causal else is_near

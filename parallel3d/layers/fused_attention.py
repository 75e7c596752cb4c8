"""Attention by kernels whose memory grows with the sequence, not with its square: how each call of
the table in `config.attention_kernels` is made. Shapes: B batch, S sequence, T the context's
sequence, H query heads, G key-value heads, K head dim; all heads are those of one tp rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.attention_kernels import (
    MOST_SCORE_BYTES,
    AttentionCall,
    AttentionDevice,
    AttentionKernel,
    attention_kernel,
)
from parallel3d.layers.positions import PackedDocuments

_TORCH = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))
_LEAST_BLOCK = 1024  # queries of a window's block: smaller ones are many launches


def device_of(device: torch.device) -> AttentionDevice:
    """Returns what the choice of a kernel depends on. Fake tensors of a GPU that is not there count
    as an A100's."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return AttentionDevice(device.type, torch=_TORCH)
    return AttentionDevice(
        device.type,
        capability=torch.cuda.get_device_capability(device),
        torch=_TORCH,
        cudnn=torch.backends.cudnn.version() or 0,
        is_rocm=torch.version.hip is not None,
    )


def kernel_of(
    q: Tensor,
    k: Tensor,
    *,
    mask: bool = False,
    window: bool = False,
    documents: bool = False,
    dropout: bool = False,
) -> AttentionKernel:
    """Returns the kernel for q [B, S, H, K] and k [B, T, G, K] with what the flags say."""
    call = AttentionCall(
        item_bytes=q.dtype.itemsize,
        is_bf16=q.dtype == torch.bfloat16,
        head_dim=q.shape[-1],
        is_grouped=q.shape[2] != k.shape[2],
        has_mask=mask,
        has_window=window,
        has_documents=documents,
        has_dropout=dropout,
        trains=torch.is_grad_enabled() and q.requires_grad,
    )
    return attention_kernel(call, device_of(q.device))


def refuse_large_scores(kernel: AttentionKernel, q: Tensor, k: Tensor, *, masks: int = 1) -> None:
    """Raises ValueError, with a remedy, if a GPU would write out more than `MOST_SCORE_BYTES` for q
    [B, S, H, K] and k [B, T, G, K], of which a mask has so many sequences of its own. A CPU may
    write them."""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    bytes_ = kernel.quadratic_bytes(
        batch=batch, heads=heads, queries=queries, keys=keys, masks=masks
    )
    if q.is_cuda and bytes_ > MOST_SCORE_BYTES:
        dtype = str(q.dtype).removeprefix("torch.")
        raise ValueError(
            f"attention of {queries} queries and {keys} keys, batch {batch}, {heads} heads of "
            f"{q.shape[3]} in {dtype}: {kernel.why_quadratic} and would take {bytes_ / 2**30:.1f} "
            f"GiB, of at most {MOST_SCORE_BYTES / 2**30:.0f}; try {kernel.remedy}, or a smaller "
            "batch or length"
        )


def attend(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Returns softmax(scale q k^T + mask) v [B, H, S, K] by torch's fastest kernel. `causal` goes
    without a mask."""
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def attend_by_varlen(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    documents: PackedDocuments | None,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Returns the attention [B, S, H, K] by CUDA's kernel for sequences of different lengths, which
    skips what a window hides: of `documents`, or of whole sequences where it is None. Nothing is
    copied to the GPU."""
    from torch.nn.attention.varlen import varlen_attn  # which imports the compiler

    (batch, seq, heads, _), device = q_BSHK.shape, q_BSHK.device
    if documents is None:
        starts, longest = torch.arange(batch + 1, device=device, dtype=torch.int32) * seq, seq
    else:
        starts, longest = documents.starts, max(documents.lengths)
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
        scale=scale,
        window_size=(side, 0 if causal else side),
        enable_gqa=heads != k_BSGK.shape[2],
    )
    assert isinstance(y, Tensor)  # a second result comes where it is asked for
    return y.unflatten(0, (batch, seq))


def attend_in_window(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    *,
    causal: bool,
    window: int,
    scale: float | None,
) -> Tensor:
    """Returns the attention [B, S, H, K] of queries that see `window` keys at most, block of
    queries by block: each needs its own block of keys and its neighbours', so that the masks are 2
    or 3 blocks wide however long S is."""
    step = max(window, _LEAST_BLOCK)
    blocks = [part.transpose(1, 2).split(step, dim=2) for part in (q_BSHK, k_BSGK, v_BSGK)]
    parts, masks = [], dict[tuple[int, int, int], Tensor]()
    for at, q in enumerate(blocks[0]):
        first = max(at - 1, 0)
        k, v = (torch.cat(part[first : at + (1 if causal else 2)], dim=2) for part in blocks[1:])
        shape = q.shape[2], k.shape[2], (at - first) * step
        if shape not in masks:  # as the kernel adds it to the scores, one for all blocks alike
            mask = own_mask(
                shape[0], shape[1], causal=causal, window=window, device=q.device, first=shape[2]
            )
            assert mask is not None
            masks[shape] = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        parts.append(attend(q, k, v, masks[shape], causal=False, scale=scale))
    return torch.cat(parts, dim=2).transpose(1, 2)


def own_mask(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device,
    first: int | None = None,
) -> Tensor | None:
    """Returns the mask [S, T] of an attention's own settings; None where every query sees every
    key. With `window` a query sees that many keys at most, itself the last of them (Beltagy et al.
    2020, arXiv 2004.05150; Mistral's), and as many on the other side where the attention is not
    causal. The first query stands at key `first`; without it the queries are the last of the keys,
    as torch's causal_lower_right has them."""
    if not causal and window is None:
        return None
    first = keys - queries if first is None else first
    query = torch.arange(first, first + queries, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    if window is None:
        return query >= key
    return (key + window > query) & (query >= key if causal else query + window > key)

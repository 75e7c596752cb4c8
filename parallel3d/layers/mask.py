"""Masks say which keys a query may see: bool tensors for scaled_dot_product_attention, True where it may.

Shapes: B batch, S queries, T keys. A mask is [B or 1, 1, S, T] and the same for every head, so that every tp rank uses
the same one; it costs S T bytes a sequence. torch's kernels that skip whole blocks instead train on GPUs alone and are
not used: flex_attention has no backward on a CPU (2.13), and varlen is CUDA's. For packed documents
`ParallelAttention.forward(lengths=...)` needs no mask.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def same_document(documents: Tensor) -> Tensor:
    """Makes the mask of packed sequences: document ids [B, S] -> [B, 1, S, S], True within a document. Make it once a
    batch, not once a layer. Causality is the attention's own and need not be in it."""
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)


def documents_from_cu_seqlens(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """Turns the cumulative lengths of varlen attention, [documents + 1] from 0 to B * seq_len, into document ids
    [B, seq_len].
    A document that crosses the end of a sequence goes on in the next one as another."""
    tokens = int(cu_seqlens[-1])
    if tokens % seq_len:
        raise ValueError(f"cu_seqlens: ends at {tokens}, which is no multiple of seq_len = {seq_len}")
    places = torch.arange(tokens, device=cu_seqlens.device)
    return torch.bucketize(places, cu_seqlens[1:].to(places.dtype), right=True).view(-1, seq_len)


def lengths_of_documents(documents: Tensor) -> list[int]:
    """Returns the lengths, in order, of documents whose ids [B, S] are equal and adjacent, for `lengths` of
    `ParallelAttention`. Call it once a batch, since it waits for a GPU. A document ends with its sequence."""
    batch, seq = documents.shape
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = starts.flatten().nonzero().flatten().tolist()
    return [end - start for start, end in pairwise([*places, batch * seq])]


def own_mask(queries: int, keys: int, *, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Returns the mask [S, T] of an attention's own settings; None where every query sees every key. With `window` a
    query sees that many keys at most, itself the last of them (Beltagy et al. 2020, arXiv 2004.05150; Mistral's), and
    as many on the other side where the attention is not causal."""
    if not causal and window is None:
        return None
    # Queries are the last of the keys, as torch's causal_lower_right has them.
    distance = torch.arange(keys - queries, keys, device=device).unsqueeze(1) - torch.arange(keys, device=device)
    mask = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    return mask

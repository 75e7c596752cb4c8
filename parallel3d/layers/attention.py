"""Attention, its heads split over tp, and the masks that say which keys a query may see.

Shapes: B batch, S sequence, T the context's sequence (S in self-attention), D hidden, H query
heads, G key-value heads, K head dim, n = tp.

[Note: masks] A mask is bool [B or 1, 1, S, T], True where a query may see a key, and the same for
every head, so that every tp rank uses the same one; it costs S T bytes a sequence, and twice that
again in the kernel's dtype. Nothing else of an attention grows with S T on a GPU: a window and
packed documents have kernels of their own or are computed in pieces (`config.attention_kernels` is
the table, `fused_attention` makes the calls). A CPU computes a window by a mask. flex_attention,
which would do all of it, has to be compiled and has no backward on a CPU (2.13), so that nothing
here could compare it with anything; it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from parallel3d.config.rules_layout import divides_key_value_heads
from parallel3d.layers.dropout import Dropout
from parallel3d.layers.fused_attention import (
    attend,
    attend_by_varlen,
    attend_in_window,
    kernel_of,
    own_mask,
    refuse_large_scores,
)
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import Initializer, LayerTp, ParallelModule, normal, zeros
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a model chooses of its attention, beside the numbers of heads. The defaults are those of
    Llama."""

    head_dim: int | None = None  # K; hidden / heads where it is None
    # features of the context in cross-attention; hidden where it is None
    context_hidden: int | None = None
    bias: bool = False  # q, k and v have biases
    output_bias: bool = False
    bias_init: Initializer = zeros
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, before rotary (Qwen 3)
    norm_eps: float = 1e-5
    causal: bool = True
    window: int | None = None  # keys that a query sees at most (`own_mask`)
    scale: float | None = None  # of the scores; 1 / sqrt(K) where it is None
    dropout: float = 0.0  # of the probabilities
    name: str = "attention"  # the layer's global name, which its dropout depends on
    # The attention's own intermediate results are computed again in the backward instead of kept.
    # Under torch.compile they are not: it fails on a checkpoint among DTensor parameters (2.13).
    recompute: bool = False


class ParallelAttention(ParallelModule):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): multi-head with as many
    kv_heads as heads, multi-query with one.

    x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`. Each tp rank
    computes heads / tp queries over kv_heads / tp keys and values. Where tp exceeds kv_heads, tp /
    kv_heads neighbours compute the same key-value head: k and v are then whole on every rank, and
    their gradients summed over tp. Sends what one column- and one row-parallel linear send, for
    cross-attention (a `context` of `context_hidden` features in `forward`) two column-parallel
    ones.

    `rotary` turns queries and keys by their positions. `options` are what else a model chooses. The
    weights of q, k and v start by `init`, that of the output by `output_init` or else by `init`.

    Raises ValueError where the heads cannot be spread over tp.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        rotary: RotaryEmbedding | None = None,
        tp: LayerTp = None,
        options: AttentionOptions = AttentionOptions(),
        init: Initializer = normal(0.02),
        output_init: Initializer | None = None,
    ) -> None:
        super().__init__(tp)
        self.options = options
        self.head_dim = options.head_dim or hidden // heads
        self.rotary = rotary
        n = self.axis.size
        if heads % kv_heads or heads % n or not divides_key_value_heads(kv_heads, n):
            raise ValueError(
                f"ParallelAttention: heads = {heads}, kv_heads = {kv_heads}, tp = {n}: kv_heads "
                "must divide heads, tp must divide heads, and of tp and kv_heads one the other"
            )

        copies, K = max(n // kv_heads, 1), self.head_dim
        context_hidden = options.context_hidden or hidden
        column = partial(
            ColumnParallelLinear, tp=tp, init=init, bias=options.bias, bias_init=options.bias_init
        )
        self.q = column(hidden, heads * K)
        self.k = column(context_hidden, kv_heads * K, copies=copies)
        self.v = column(context_hidden, kv_heads * K, copies=copies)
        init, bias = output_init or init, options.output_bias
        self.o = RowParallelLinear(
            heads * K, hidden, tp=tp, init=init, bias=bias, bias_init=options.bias_init
        )
        norm = partial(RMSNorm, K, eps=options.norm_eps, tp=tp, over_heads=True)
        self.q_norm = norm() if options.qk_norm else None
        self.k_norm = norm() if options.qk_norm else None
        self.dropout: Dropout | None = None
        # it drops probabilities [batch, heads, queries, keys], whose heads are split
        if options.dropout:
            self.dropout = Dropout(options.dropout, name=options.name, tp=self.tp, split_dim=1)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        documents: PackedDocuments | None = None,
        positions: Tensor | None = None,
        key: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention's output for x. Keys and values come from `context` [batch, T,
        context_hidden] (T / tp of it under sequence parallelism), or from x without one. `mask`
        [batch or 1, 1, S, T], bool, True where a query may see a key: holds beside the attention's
        own causality and window; for packed documents `same_document(numbers)`, or instead of a
        mask `documents`: then each is attended to alone, and no S^2 numbers exist. `positions`
        [batch, S]: of the rotation; without them those of the documents. `key` [batch]: of dropout.
        Raises ValueError where documents are of other sequences than x, or come with a mask, a
        context or dropout."""
        dropping = self.dropout is not None and self.training
        if documents is not None:
            if mask is not None or context is not None or dropping:
                raise ValueError(
                    "ParallelAttention: documents go with no mask, context or dropout; try a mask "
                    "of same_document"
                )
            parts = self.axis.size if self.sequence_parallel else 1
            shape = (x_BSD.shape[0], x_BSD.shape[1] * parts)
            if documents.positions.shape != shape:
                raise ValueError(
                    f"ParallelAttention: documents of {list(documents.positions.shape)} tokens, "
                    f"and x has {list(shape)}"
                )
            positions = documents.positions if positions is None else positions
        if context is None:
            q, k, v = column_parallel(x_BSD, (self.q, self.k, self.v))
        else:
            (q,) = column_parallel(x_BSD, (self.q,))
            k, v = column_parallel(context, (self.k, self.v))
        # [B, S, H / n or G / n, K]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        inputs = (q, k, v, mask, documents, key)
        if self.options.recompute and torch.is_grad_enabled() and not is_compiling():
            draws = self.dropout is not None and key is None
            y = checkpoint(self._attend, *inputs, use_reentrant=False, preserve_rng_state=draws)
        else:
            y = self._attend(*inputs)
        return self.o(y.flatten(-2))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        documents: PackedDocuments | None,
        key: Tensor | None,
    ) -> Tensor:  # q [B, S, H / n, K], k and v [B, T, G / n, K]
        causal, scale, window = self.options.causal, self.options.scale, self.options.window
        queries, keys = q.shape[1], k.shape[1]
        dropout = self.dropout if self.training else None
        if window is not None and window >= keys:
            window = None  # a window that hides nothing costs no mask
        # which no kernel of torch knows
        is_shifted = queries != keys and (causal or window is not None)
        has_mask = mask is not None or is_shifted
        has_window, drops = window is not None, dropout is not None
        kernel = kernel_of(
            q, k, mask=has_mask, window=has_window, documents=documents is not None, dropout=drops
        )
        if kernel.name == "varlen":
            return attend_by_varlen(q, k, v, documents, causal=causal, window=window, scale=scale)
        if documents is not None:
            return self._attend_each(q, k, v, documents.lengths)
        if kernel.repeats_heads:
            repeats = q.shape[2] // k.shape[2]
            k, v = (part.repeat_interleave(repeats, dim=2) for part in (k, v))
        if kernel.in_pieces and window is not None:
            return attend_in_window(q, k, v, causal=causal, window=window, scale=scale)
        refuse_large_scores(kernel, q, k, masks=1 if mask is None else mask.shape[0])
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if has_mask or has_window or drops:
            own = own_mask(queries, keys, causal=causal, window=window, device=q.device)
            if own is not None:
                mask = own if mask is None else mask & own
            causal = False
        if dropout is None:
            return attend(q, k, v, mask, causal=causal, scale=scale).transpose(1, 2)
        # The probabilities [B, H, S, T] are written out: torch's kernels draw their dropout from
        # one generator, which on tp ranks of equal seeds would drop the same elements of different
        # heads.
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.softmax(dim=-1, dtype=wide).to(v.dtype)
        return (dropout(probabilities, key) @ v).transpose(1, 2)

    def _attend_each(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        """Attends within each document by itself."""
        each = [part.flatten(0, 1).unsqueeze(0).split(lengths, dim=1) for part in (q, k, v)]
        parts = [self._attend(q, k, v, None, None, None) for q, k, v in zip(*each, strict=True)]
        return torch.cat(parts, dim=1).view(*q.shape[:3], -1)


def same_document(documents: Tensor) -> Tensor:
    """Makes the mask of packed sequences: numbers of documents [B, S] -> [B, 1, S, S], True within
    a document. Make it once a batch, not once a layer. Causality is the attention's own and need
    not be in it."""
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)

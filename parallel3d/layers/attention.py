"""Attention, its heads split over tp.

Shapes: B batch, S sequence, D hidden, H query heads, G key-value heads, K head dim, n = tp.

[Note: kernels] `config.attention_kernels` is the table of kernels, and `fused_attention` makes the
calls. On a GPU no memory of an attention grows with S^2, except with dropout of its probabilities,
or with a window that no kernel takes. A CPU computes a window by a mask. flex_attention is not
used: it has to be compiled and has no backward pass on a CPU (2.13), so that no test could compare
it with anything.
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
    kernel_of,
    own_mask,
)
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.loss import wide_dtype
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import LayerTp, ParallelModule
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a model chooses of its attention, beside the numbers of heads. The defaults are those of
    Llama.

    Example:
        >>> options = parallel3d.AttentionOptions(window=4096, qk_norm=True)
        >>> layer = parallel3d.ParallelAttention(64, 4, 2, tp=tp, options=options)
    """

    head_dim: int | None = None  # K; hidden / heads where it is None
    bias: bool = False  # q, k and v have biases
    output_bias: bool = False
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, before rotary (Qwen 3)
    norm_eps: float = 1e-5
    causal: bool = True
    window: int | None = None  # keys that a query sees at most (`own_mask`)
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
    their gradients summed over tp. Sends what one column- and one row-parallel linear send.

    `rotary` turns queries and keys by their positions. `options` are what else a model chooses.

    Raises ValueError where the heads cannot be spread over tp.

    Example:
        >>> layer = parallel3d.ParallelAttention(64, 4, 2, rotary=parallel3d.RotaryEmbedding(16))
        >>> layer(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
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

        copies = max(n // kv_heads, 1)
        K = self.head_dim
        linear = partial(ColumnParallelLinear, hidden, tp=tp, bias=options.bias)
        self.q = linear(heads * K)
        self.k = linear(kv_heads * K, copies=copies)
        self.v = linear(kv_heads * K, copies=copies)
        self.o = RowParallelLinear(heads * K, hidden, tp=tp, bias=options.output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if options.qk_norm:
            norm = partial(RMSNorm, K, eps=options.norm_eps, tp=tp, over_heads=True)
            self.q_norm = norm()
            self.k_norm = norm()
        self.dropout: Dropout | None = None
        # it drops probabilities [batch, heads, queries, keys], whose heads are split
        if options.dropout:
            self.dropout = Dropout(options.dropout, name=options.name, tp=self.tp, split_dim=1)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        mask: Tensor | None = None,
        documents: PackedDocuments | None = None,
        positions: Tensor | None = None,
        key: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention's output for x.

        Args:
            mask: [batch or 1, 1, S, S], bool, True if a query may see a key. The attention's own
                causality and window hold as well.
            documents: Each of the packed documents is attended to by itself, and no S^2 numbers
                exist.
            positions: [batch, S], of the rotation. Default: those of the documents.
            key: [batch], of dropout.

        Raises:
            ValueError: Documents come with a mask, or are of other sequences than x.
        """
        if documents is not None:
            if mask is not None:
                raise ValueError("ParallelAttention: give a mask or documents, not both")
            parts = self.axis.size if self.sequence_parallel else 1
            shape = (x_BSD.shape[0], x_BSD.shape[1] * parts)
            if documents.positions.shape != shape:
                raise ValueError(
                    f"ParallelAttention: documents of {list(documents.positions.shape)} tokens, "
                    f"and x has {list(shape)}"
                )
            if positions is None:
                positions = documents.positions
        q, k, v = column_parallel(x_BSD, (self.q, self.k, self.v))
        # [B, S, H / n or G / n, K]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.rotary is not None:
            q = self.rotary(q, positions)
            k = self.rotary(k, positions)
        inputs = (q, k, v, mask, documents, key)
        if self.options.recompute and torch.is_grad_enabled() and not is_compiling():
            y = checkpoint(self._attend, *inputs, use_reentrant=False, preserve_rng_state=False)
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
    ) -> Tensor:  # q [B, S, H / n, K], k and v [B, S, G / n, K]
        causal = self.options.causal
        window = self.options.window
        seq = q.shape[1]
        dropout = self.dropout if self.training else None
        if window is not None and window >= seq:
            window = None  # a window that hides nothing costs no mask
        kernel = kernel_of(
            q,
            k,
            has_mask=mask is not None,
            has_window=window is not None,
            has_documents=documents is not None,
            has_dropout=dropout is not None,
        )
        if kernel.name == "varlen":
            return attend_by_varlen(q, k, v, documents, causal=causal, window=window)
        if documents is not None:
            return self._attend_each(q, k, v, documents.lengths)
        if kernel.repeats_heads:
            repeats = q.shape[2] // k.shape[2]
            k, v = (part.repeat_interleave(repeats, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if mask is None and window is None and dropout is None:
            return attend(q, k, v, None, causal=causal).transpose(1, 2)
        own = own_mask(seq, causal=causal, window=window, device=q.device)
        mask = own if mask is None else mask & own
        if dropout is None:
            return attend(q, k, v, mask, causal=False).transpose(1, 2)
        # The probabilities [B, H, S, S] are written out: torch's kernels draw their dropout from
        # one generator, which on tp ranks of equal seeds would drop the same elements of different
        # heads.
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = scores.softmax(dim=-1, dtype=wide_dtype(scores)).to(v.dtype)
        return (dropout(probabilities, key) @ v).transpose(1, 2)

    def _attend_each(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        """Attends within each document by itself."""
        each = [part.flatten(0, 1).unsqueeze(0).split(lengths, dim=1) for part in (q, k, v)]
        parts = [self._attend(q, k, v, None, None, None) for q, k, v in zip(*each, strict=True)]
        return torch.cat(parts, dim=1).view(*q.shape[:3], -1)

"""Attention with its heads split over tp.

Shapes: B batch, S sequence, D hidden, H query heads, G key/value heads, K head dim, n = tp.

[Note: kernels] `config.attention_kernels` lists the kernels, and `fused_attention` calls them. On a
GPU no attention memory grows with S^2, except with a mask, attention dropout, a window that no
kernel supports, or inputs that only `math` accepts, such as float64. On a CPU, a window is a mask.
flex_attention is not used, because it has no backward pass on CPUs (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from parallel3d.config.rules_layout import divides_key_value_heads
from parallel3d.layers.context_parallel import attend_chunks, attend_to_sequence
from parallel3d.layers.dropout import Dropout, Within
from parallel3d.layers.fused_attention import (
    Segments,
    attend,
    attend_by_varlen,
    kernel_of,
)
from parallel3d.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    flat_tokens,
)
from parallel3d.layers.loss import wide_dtype
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import LayerTp, ParallelModule
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.recompute import recomputed
from parallel3d.layers.sequence import visible


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of an attention layer, except its numbers of heads. The defaults match Llama.

    Args:
        head_dim: Size of each head. Default: hidden / heads.
        bias: If True, q, k and v have biases.
        output_bias: If True, the output projection has a bias.
        qk_norm: If True, applies an RMSNorm to queries and keys of each head before the rotary
            embedding, as in Qwen 3.
        norm_eps: Epsilon of these norms.
        causal: If True, a query sees only keys up to its own position.
        window: Largest number of keys that a query sees, including its own. Without `causal`, it
            applies in each direction. None means no limit.
        dropout: Dropout probability of the attention weights.
        name: Global name of the layer, which determines its dropout masks.
        recompute: If True, intermediate results of the attention are recomputed in the backward
            pass. Ignored under torch.compile, which does not support checkpointing with DTensor
            parameters (torch 2.13).

    Example:
        >>> options = parallel3d.AttentionOptions(window=4096, qk_norm=True)
        >>> layer = parallel3d.ParallelAttention(64, 4, 2, tp=tp, options=options)
    """

    head_dim: int | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    causal: bool = True
    window: int | None = None
    dropout: float = 0.0
    name: str = "attention"
    recompute: bool = False


class ParallelAttention(ParallelModule):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with heads split over tp.

    kv_heads = heads gives multi-head attention. kv_heads = 1 gives multi-query attention.

    Shapes: x and y [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence parallelism.
    Each tp rank computes heads / tp query heads over kv_heads / tp key/value heads. If tp exceeds
    kv_heads, tp / kv_heads neighboring ranks compute the same key/value head. The weights of k and
    v are then replicated, and their gradients are summed over tp.

    Under context parallelism (`ParallelContext(cp=...)`) seq is this rank's part of the sequence
    (`SequencePart`), and `documents` and `positions` describe full sequences. Masks are refused.

    Communication: that of one column-parallel and one row-parallel linear layer, and with cp that
    of `layers.context_parallel`.

    Args:
        hidden: Hidden size of the model.
        heads: Number of query heads. tp must divide it.
        kv_heads: Number of key/value heads. It must divide `heads`. Either tp divides kv_heads or
            kv_heads divides tp.
        rotary: Rotary embedding of queries and keys.
        tp: Tensor-parallel axis or a `ParallelContext`.
        options: Further options.

    Raises:
        ValueError: `heads`, `kv_heads` and tp do not divide as required.

    Example:
        >>> layer = parallel3d.ParallelAttention(64, 4, 2, rotary=parallel3d.RotaryEmbedding(16))
        >>> layer(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    is_recomputed = False  # True if the backward pass calls this layer again.

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
                "and tp must divide heads, and one of tp and kv_heads must divide the other; "
                f"try tp = 1 and kv_heads = {heads}"
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
        # Applied to the attention weights [batch, heads, queries, keys], which tp splits by heads.
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
        """Computes the attention of x.

        Args:
            x_BSD: Input [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence
                parallelism.
            mask: Boolean mask [batch or 1, 1, seq, seq], True if a query may see a key. Applied in
                addition to causality and window.
            documents: Packed documents. Attention stays within each document, without a mask of
                size seq^2.
            positions: Positions [batch, seq] of the rotary embedding, for full sequences. Default:
                positions within each document, or within the sequence without `documents`.
            key: Dropout key [batch] from `dropout_key`.

        Returns:
            Output in the shape of x.

        Raises:
            ValueError: Both `mask` and `documents` are given, or the documents do not match the
                shape of x.
        """
        batch, seq, _ = x_BSD.shape
        if self.sequence_parallel:
            seq *= self.axis.size
        if documents is not None:
            if mask is not None:
                raise ValueError(
                    "ParallelAttention: mask and documents cannot be combined; pass one of them"
                )
            shape = (batch, seq * self.sequence_part.ranks)
            if documents.positions.shape != shape:
                raise ValueError(
                    f"ParallelAttention: documents of shape {list(documents.positions.shape)}: "
                    f"must match x of shape {list(shape)}; build them from the same batch"
                )
            if positions is None:
                positions = documents.positions
        if mask is not None and self.sequence_part.ranks > 1:
            raise ValueError(
                "ParallelAttention: mask cannot be combined with cp = "
                f"{self.sequence_part.ranks}; pass documents instead, or use cp = 1"
            )
        q, k, v = column_parallel(flat_tokens(x_BSD, self), (self.q, self.k, self.v))
        flat_shape = q.shape  # [B S, H / n K], or [B, S, H / n K] under sequence parallelism
        K = self.head_dim
        # [B, S, H / n or G / n, K]
        q, k, v = (part.view(batch, seq, part.shape[-1] // K, K) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.rotary is not None:
            q = self.rotary(q, positions, self.sequence_part)
            k = self.rotary(k, positions, self.sequence_part)
        inputs = (q, k, v, mask, documents, key)
        if self.options.recompute and torch.is_grad_enabled() and not is_compiling():
            y = recomputed(self._attend, *inputs)
        else:
            y = self._attend(*inputs)
        return self.o(y.reshape(flat_shape)).view(x_BSD.shape)

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
        part = self.sequence_part
        seq = q.shape[1] * part.ranks
        dropout = self.dropout if self.training else None
        if window is not None and window >= seq:
            window = None  # A window this long hides nothing, so no mask is needed.
        kernel = kernel_of(
            q,
            k,
            has_mask=mask is not None,
            has_window=window is not None,
            has_documents=documents is not None,
            has_dropout=dropout is not None,
            has_chunks=part.ranks > 1,
        )
        if part.ranks > 1:
            attend_block = partial(
                self._attend_block,
                seq=seq,
                repeats_heads=kernel.repeats_heads,
                key=key,
            )
            attend_own = partial(
                attend_chunks,
                part=part,
                documents=documents,
                causal=causal,
                window=window,
                attend_block=None if kernel.name == "varlen" else attend_block,
            )
            recomputed = self.options.recompute or self.is_recomputed
            return attend_to_sequence(q, k, v, part, attend_own, recomputed=recomputed)
        if kernel.name == "varlen":
            if documents is not None:
                segments = Segments(documents.starts, max(documents.lengths))
            else:
                starts = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32) * seq
                segments = Segments(starts, seq)
            return attend_by_varlen(q, k, v, segments, segments, causal=causal, window=window)
        if documents is not None:
            return self._attend_each(q, k, v, documents.lengths)
        if kernel.repeats_heads:
            repeats = q.shape[2] // k.shape[2]
            k, v = (part.repeat_interleave(repeats, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if mask is None and window is None and dropout is None:
            return attend(q, k, v, None, causal=causal).transpose(1, 2)
        own = visible(range(seq), range(seq), causal, window, q.device)
        mask = own if mask is None else mask & own
        if dropout is None:
            return attend(q, k, v, mask, causal=False).transpose(1, 2)
        return self._attend_with_dropout(q, k, v, mask, key, {}).transpose(1, 2)

    def _attend_block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: slice,
        queries: range,
        keys: range,
        *,
        seq: int,
        repeats_heads: bool,
        key: Tensor | None,
    ) -> Tensor:
        """Attention of a few queries in `rows` of the batch to the keys near them."""
        causal = self.options.causal
        window = self.options.window
        has_dropout = self.dropout is not None and self.training
        group = q.shape[2] // k.shape[2] if repeats_heads else 1
        if has_dropout:
            k, v = (part.repeat_interleave(group, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if has_dropout:
            mask = visible(queries, keys, causal, window, q.device)
            within = {2: (queries, seq), 3: (keys, seq)}
            own_key = None if key is None else key[rows]
            return self._attend_with_dropout(q, k, v, mask, own_key, within).transpose(1, 2)
        bias: Tensor | None = None
        if causal:
            bias = self.sequence_part.last_queries_mask(
                len(queries),
                len(keys),
                longest=seq,
                window=window,
                repeats=group,
                like=q,
            )
        elif window is not None:
            bias = visible(queries, keys, causal, window, q.device).repeat(group, 1)
        # Heads that share keys become further queries, because repeated keys would be kept for each
        # block.
        folded = q.unflatten(1, (-1, group)).flatten(2, 3)
        y = attend(folded, k, v, bias, causal=False)
        return y.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2)

    def _attend_with_dropout(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        key: Tensor | None,
        within: Within,
    ) -> Tensor:
        """Computes the scores [B, H, S, T] explicitly.

        torch's kernels draw dropout from one generator, so tp ranks with equal seeds would drop the
        same elements of different heads.
        """
        assert self.dropout is not None
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = scores.softmax(dim=-1, dtype=wide_dtype(scores)).to(v.dtype)
        return self.dropout(probabilities, key, within) @ v

    def _attend_each(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        each = [part.flatten(0, 1).unsqueeze(0).split(lengths, dim=1) for part in (q, k, v)]
        parts = [self._attend(q, k, v, None, None, None) for q, k, v in zip(*each, strict=True)]
        return torch.cat(parts, dim=1).view(*q.shape[:3], -1)

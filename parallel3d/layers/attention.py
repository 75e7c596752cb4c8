"""Attention, its heads split over tp.

Shapes: B batch, S sequence, T the context's sequence (S in self-attention), D hidden, H query heads, G key-value heads,
K head dim, n = tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from parallel3d.config.rules_layout import divides_key_value_heads
from parallel3d.layers.dropout import Dropout, DropoutMode
from parallel3d.layers.init import normal, zeros
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.mask import own_mask
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import Initializer, ParallelModule
from parallel3d.layers.placement import LayerTp
from parallel3d.layers.rotary import RotaryEmbedding
from parallel3d.layers.scores import attend, attend_with_dropout


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a model chooses of its attention, beside the numbers of heads. The defaults are those of Llama."""

    head_dim: int | None = None  # K; hidden / heads where it is None
    context_hidden: int | None = None  # features of the context in cross-attention; hidden where it is None
    bias: bool = False  # q, k and v have biases
    output_bias: bool = False
    bias_init: Initializer = zeros
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, before rotary (Qwen 3)
    norm_eps: float = 1e-5
    causal: bool = True
    window: int | None = None  # keys that a query sees at most (`mask.own_mask`)
    scale: float | None = None  # of the scores; 1 / sqrt(K) where it is None
    dropout: float = 0.0  # of the probabilities
    dropout_mode: DropoutMode = "exact"
    name: str = "attention"  # the layer's global name, which its dropout depends on
    # The attention's own intermediate results are computed again in the backward instead of kept. Under torch.compile
    # they are not: it fails on a checkpoint among DTensor parameters (2.13).
    recompute: bool = False


class ParallelAttention(ParallelModule):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): multi-head with as many kv_heads as heads,
    multi-query with one.

    x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`. Each tp rank computes heads / tp
    queries over kv_heads / tp keys and values. Where tp exceeds kv_heads, tp / kv_heads neighbours compute the same
    key-value head: k and v are then whole on every rank, and their gradients summed over tp. Sends what one column- and
    one row-parallel linear send, for cross-attention (a `context` of `context_hidden` features in `forward`) two
    column-parallel ones.

    `rotary` turns queries and keys by their positions. `options` are what else a model chooses. The weights of q, k and
    v start by `init`, that of the output by `output_init` or else by `init`.

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
        self._check_heads(heads, kv_heads)

        def column(in_features: int, heads: int, copies: int) -> ColumnParallelLinear:
            bias, start, features = options.bias, options.bias_init, heads * self.head_dim
            return ColumnParallelLinear(
                in_features, features, tp=tp, init=init, bias=bias, bias_init=start, copies=copies
            )

        copies = max(self.axis.size // kv_heads, 1)
        self.q = column(hidden, heads, 1)
        self.k = column(options.context_hidden or hidden, kv_heads, copies)
        self.v = column(options.context_hidden or hidden, kv_heads, copies)
        self.o = RowParallelLinear(
            heads * self.head_dim,
            hidden,
            tp=tp,
            init=output_init or init,
            bias=options.output_bias,
            bias_init=options.bias_init,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if options.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=options.norm_eps, tp=tp, over_heads=True)
            self.k_norm = RMSNorm(self.head_dim, eps=options.norm_eps, tp=tp, over_heads=True)
        self.dropout: Dropout | None = None
        if options.dropout:  # it drops probabilities [batch, heads, queries, keys], whose heads are split
            mode = options.dropout_mode
            self.dropout = Dropout(options.dropout, name=options.name, tp=self.tp, split_dim=1, mode=mode)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        positions: Tensor | None = None,
        key: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention's output for x. Keys and values come from `context` [batch, T, context_hidden] (T / tp
        of it under sequence parallelism), or from x without one. `mask` [batch or 1, 1, S, T], bool, True where a query
        may see a key: holds beside the attention's own causality and window; for packed documents
        `mask.same_document(ids)`, or instead of a mask their `lengths`, in order and S in sum for each sequence: then
        each is attended to alone, and no S^2 numbers exist. `positions` [batch, S]: of the rotation. `key` [batch]: of
        dropout. Raises ValueError where lengths do not add up, or come with a mask, a context or dropout."""
        if lengths is not None:
            self._check_lengths(lengths, x_BSD, mask, context)
        if context is None:
            q, k, v = column_parallel(x_BSD, (self.q, self.k, self.v))
        else:
            (q,) = column_parallel(x_BSD, (self.q,))
            k, v = column_parallel(context, (self.k, self.v))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))  # [B, S, H / n or G / n, K]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if self.options.recompute and torch.is_grad_enabled() and not is_compiling():
            keep_generator = self.dropout is not None and key is None
            y = checkpoint(
                self._attend_all, q, k, v, mask, lengths, key, use_reentrant=False, preserve_rng_state=keep_generator
            )
        else:
            y = self._attend_all(q, k, v, mask, lengths, key)
        return self.o(y.flatten(-2))

    def _attend_all(
        self,
        q_BSHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        mask: Tensor | None,
        lengths: Sequence[int] | None,
        key: Tensor | None,
    ) -> Tensor:
        if lengths is None:
            return self._attend(q_BSHK, k_BTGK, v_BTGK, mask, key)
        documents = (part.flatten(0, 1).unsqueeze(0).split(list(lengths), dim=1) for part in (q_BSHK, k_BTGK, v_BTGK))
        parts = [self._attend(q, k, v, None, None) for q, k, v in zip(*documents, strict=True)]
        return torch.cat(parts, dim=1).view(*q_BSHK.shape[:3], -1)

    def _attend(
        self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | None, key: Tensor | None
    ) -> Tensor:
        queries, keys = q_BSHK.shape[1], k_BTGK.shape[1]
        q, k, v = (part.transpose(1, 2) for part in (q_BSHK, k_BTGK, v_BTGK))
        causal, window, scale = self.options.causal, self.options.window, self.options.scale
        dropping = self.dropout is not None and self.training
        sees_all = window is None or window >= keys  # a window that hides nothing costs no mask
        if mask is None and sees_all and not dropping and (queries == keys or not causal):
            return attend(q, k, v, None, causal=causal, scale=scale).transpose(1, 2)
        own = own_mask(queries, keys, causal=causal, window=window, device=q.device)
        if own is not None:
            mask = own if mask is None else mask & own
        if dropping:
            assert self.dropout is not None
            y_BHSK = attend_with_dropout(q, k, v, mask, scale=scale, dropout=self.dropout, key=key)
        else:
            y_BHSK = attend(q, k, v, mask, causal=False, scale=scale)
        return y_BHSK.transpose(1, 2)

    def _check_lengths(
        self, lengths: Sequence[int], x_BSD: Tensor, mask: Tensor | None, context: Tensor | None
    ) -> None:
        if mask is not None or context is not None or (self.dropout is not None and self.training):
            raise ValueError("ParallelAttention: lengths go with no mask, context or dropout; try mask.same_document")
        seq = x_BSD.shape[1] * (self.axis.size if self.sequence_parallel else 1)
        ends = set(accumulate(lengths))
        if not {seq * (i + 1) for i in range(x_BSD.shape[0])} <= ends or max(ends) != seq * x_BSD.shape[0]:
            raise ValueError(
                f"ParallelAttention: lengths of {sum(lengths)} tokens in all, and there are {x_BSD.shape[0]} sequences "
                f"of {seq}; a document must end with its sequence"
            )

    def _check_heads(self, heads: int, kv_heads: int) -> None:
        n = self.axis.size
        if heads % kv_heads or heads % n or not divides_key_value_heads(kv_heads, n):
            raise ValueError(
                f"ParallelAttention: heads = {heads}, kv_heads = {kv_heads}, tp = {n}: kv_heads must divide heads, "
                f"tp must divide heads, and of tp and kv_heads one the other"
            )

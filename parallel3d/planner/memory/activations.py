"""Bytes that a transformer block saves for its backward pass.

The formula follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for pre-norm blocks
with a tiled attention kernel. It is at most 3% below and 8% above the bytes that autograd saves. A
microbatch has t = B S / cp tokens. An element has e bytes, and w = max(e, 4) bytes in a norm or softmax.
n = tp, and r = n with sequence parallelism, else 1:

    each of two RMSNorms   input e D, inverse root mean square w, output (input of the next matmul) e D       t / r
                           with separate operators (CPU): input w D, normalized input w D, w, output e D      t / r
    each of two LayerNorms input e D, mean and inverse std 2 w, output e D                                    t / r
    QK norms               input e K and w for each of H + G heads (on CPU 2 w K, w); outputs counted below   t / n
    attention              q e H K, k and v 2 e G K, output (input of the next matmul) e H K                  t / n
                           softmax statistics, unless recomputed (selective): w H                             t / n
    ungrouped GPU kernels  k and v repeated for all heads 2 e H K, unless recomputed or cp > 1                t / n
    packed documents, cp   output of each document or chunk e H K, unless recomputed                          t / n
    attention dropout      replaces w H: q, k, v 3 e H K, and per score the softmax w, the mask 1
                           and the dropped softmax e: (w + 1 + e) H S                                         t / n
    torch's math kernel    replaces w H: q, k, v 3 e H K, and per score the softmax: 4 H S                    t / n
    gated MLP              gate, up, act(gate), act(gate) * up: 4 e F                                         t / n
    MLP                    up, act(up): 2 e F                                                                 t / n
    dropout                two masks of one byte: 2 D                                                         t / r
    full recompute         input of the block e D, nothing else                                               t / r

Experts replace the MLP. A tp rank routes T = t / n tokens, each to k of E experts of size F, and its own experts
compute R rows:

    router                 in 16 bits: input 4 D, instead of the output of the norm, and weight 4 E D         T
                           scores w E, choices (also with full recompute), orders and weights                 T
    experts                input e D, gate, up, act(gate), act(gate) * up: 4 e F                              R
    results                e k D                                                                              T
    shared experts         those of a gated MLP; with a gate also their output e D                            t

G = n if there are more tp ranks than key-value heads. Tensors shared by all blocks are not counted:
RoPE tables and the dropout key.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.attention_kernels import AttentionKernel
from parallel3d.config.recipe import BlockRecompute
from parallel3d.planner.model.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Activations of a block for one microbatch [batch, seq] on one cp and tp rank. `fused_norm` is
    True for the norm kernels of GPUs."""

    shape: ModelShape
    batch: int
    seq: int
    item_bytes: int
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    fused_norm: bool = True
    dropout: bool = False
    attention: AttentionKernel = AttentionKernel("cpu")
    ep: int = 1
    rows: int = 0  # Rows that this rank's experts compute, or 0 for a block with an MLP.

    def bytes(self, recompute: BlockRecompute = "none") -> int:
        """Returns the bytes of activations that the block saves for the backward pass."""
        tokens = self.tokens
        e = self.item_bytes
        hidden = self.shape.hidden
        if recompute == "full":
            return self.outside * hidden * e + 8 * self.choices
        masks = 2 * hidden if self.dropout else 0
        between = self.outside * (2 * (self.norm_bytes(hidden) + e * hidden) + masks)
        inner = 2 * self.shape.feed_forward_inputs * self.shape.ffn_hidden
        mlp = tokens * (inner // self.tp * e)
        if self.rows:
            mlp = self._experts_bytes()
        return between + mlp + tokens * self.attention_bytes(recompute)

    def _experts_bytes(self) -> int:
        """Returns the bytes that router and experts save, in addition to the output of a norm."""
        experts = self.shape.experts
        assert experts is not None
        e = self.item_bytes
        hidden = self.shape.hidden
        routed = self.tokens // self.tp
        wide = max(e, 4)
        indices = 16 * self.choices + 16 * self.rows
        weights = (2 * wide + 8) * self.choices
        kept = indices + weights + routed * wide * experts.count
        if e < 4:
            kept += 4 * hidden * (routed + experts.count)
            if not experts.shared_hidden:
                kept -= self.outside * hidden * e
        inputs = 2 * self.shape.feed_forward_inputs
        kept += self.rows * e * (hidden + inputs * experts.hidden)
        kept += self.choices * e * hidden
        kept += self.tokens * (inputs * experts.shared_hidden // self.tp * e)
        if experts.shared_gate:
            kept += self.outside * hidden * e
        return kept

    @property
    def choices(self) -> int:
        """Experts that the router of this rank chooses, over all of its tokens."""
        if self.rows == 0 or self.shape.experts is None:
            return 0
        return self.tokens // self.tp * self.shape.experts.per_token

    def attention_bytes(self, recompute: BlockRecompute) -> int:
        """Returns the bytes that attention saves per token."""
        kernel = self.attention
        e = self.item_bytes
        heads = self.shape.heads // self.tp
        groups = self.groups
        head_dim = self.shape.head_dim
        output = e * heads * head_dim
        norms = 0  # Bytes of the norms of queries and keys.
        if self.shape.qk_norm:
            norms = (heads + groups) * self.norm_bytes(head_dim)
        repeats = kernel.repeats_heads and self.cp == 1  # Chunks share the gathered keys.
        if recompute == "none" and (repeats or kernel.kept_bytes):
            groups = heads
        kept = norms + e * (heads + 2 * groups) * head_dim + output
        if recompute != "none":
            return kept
        if kernel.in_pieces or self.cp > 1:
            kept += output
        return kept + heads * (kernel.kept_bytes * self.keys or max(e, 4))

    @property
    def tokens(self) -> int:
        return self.batch * self.seq // self.cp

    @property
    def groups(self) -> int:
        """Key-value heads of a rank."""
        return max(self.shape.kv_heads // self.tp, 1)

    @property
    def keys(self) -> int:
        """Scores per query and head. cp ranks compute only those that causality allows."""
        if self.cp == 1:
            return self.seq
        return self.seq // 2 + self.seq // (4 * self.cp)

    @property
    def gathered(self) -> int:
        """Bytes of the keys and values of full sequences, which cp ranks all-gather."""
        if self.cp == 1:
            return 0
        return 2 * self.item_bytes * self.batch * self.seq * self.groups * self.shape.head_dim

    @property
    def outside(self) -> int:
        """Tokens per rank outside attention and MLP, where sequence parallelism shards them."""
        if self.sequence_parallel:
            return self.tokens // self.tp
        return self.tokens

    def norm_bytes(self, features: int) -> int:
        """Returns the bytes that a norm over `features` saves per token, except its output."""
        kept = features * self.item_bytes
        wide = max(self.item_bytes, 4)
        if self.shape.layer_norm:
            return kept + 2 * wide
        if self.fused_norm:
            return kept + wide
        return 2 * features * wide + wide

"""The bytes of activations that transformer blocks save for their backward pass. A test compares
the formula with what autograd saves, within 3% below and 8% above.

After Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for the pre-norm blocks of models/
with attention by a tiled kernel. Bytes of a microbatch of t = B S tokens, a number taking e bytes,
and w = max(e, 4) where a norm or a softmax computes with it; n = tp, r = n with sequence
parallelism, else 1:

    each of two RMSNorms   its input e D, inverse root mean square w, output (the next product's input) e D
                           by operators of torch (CPUs): input w D, normalised input w D, w, and output e D     t / r
    each of two LayerNorms its input e D, mean and inverse deviation 2 w, output e D                           t / r
    norms of q and k       of each of H + G heads the input e K, w (on CPUs 2 w K, w); outputs are counted below t / n
    attention              q e H K, k and v 2 e G K, its output (the next product's input) e H K                t / n
                           its softmax, unless recomputed (selective): w H                                      t / n
    by a kernel of GPUs that takes no grouped heads: k and v 2 e H K, unless recomputed                         t / n
    in pieces (documents), unless recomputed: the pieces' outputs e H K                                         t / n
    with its own dropout   instead of the softmax's w: q, k, v 3 e H K; of each score the softmax w, the mask 1
                           and the dropped e: (w + 1 + e) H S                                                   t / n
    by torch's last kernel (`math`), instead: q, k, v 3 e H K; of each score the softmax: 4 H S                 t / n
    MLP with a gate        gate, up, act(gate), their product: 4 e F                                            t / n
    MLP without            up, act(up): 2 e F                                                                   t / n
    dropout                two masks of a byte: 2 D                                                             t / r
    whole block recomputed its input e D, nothing else                                                          t / r

where ranks outnumber key-value heads, G = n. What is one for all blocks is not counted: rotary
tables, dropout's key.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.attention_kernels import AttentionKernel
from parallel3d.config.recipe import BlockRecompute
from parallel3d.planner.model.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """One microbatch [batch, seq] of a block on one tp rank. `fused_norm`: as GPUs' kernels of
    norms keep it."""

    shape: ModelShape
    batch: int
    seq: int
    item_bytes: int
    tp: int = 1
    sequence_parallel: bool = False
    fused_norm: bool = True
    dropout: bool = False
    attention: AttentionKernel = AttentionKernel("cpu")

    def bytes(self, recompute: BlockRecompute = "none") -> int:
        """Returns the bytes that one block saves."""
        tokens = self.batch * self.seq
        e = self.item_bytes
        hidden = self.shape.hidden
        if recompute == "full":
            return self.outside * hidden * e
        masks = 2 * hidden if self.dropout else 0
        between = self.outside * (2 * (self.norm_bytes(hidden) + e * hidden) + masks)
        inner = 2 * self.shape.feed_forward_inputs * self.shape.ffn_hidden
        mlp = tokens * (inner // self.tp * e)
        return between + mlp + tokens * self._attention_bytes(recompute)

    def _attention_bytes(self, recompute: BlockRecompute) -> int:
        """Returns the bytes that attention saves of one token."""
        kernel = self.attention
        e = self.item_bytes
        heads = self.shape.heads // self.tp
        groups = max(self.shape.kv_heads // self.tp, 1)
        head_dim = self.shape.head_dim
        output = e * heads * head_dim
        norms = 0  # of queries and keys
        if self.shape.qk_norm:
            norms = (heads + groups) * self.norm_bytes(head_dim)
        if recompute == "none" and (kernel.repeats_heads or kernel.kept_bytes):
            groups = heads
        kept = norms + e * (heads + 2 * groups) * head_dim + output
        if recompute != "none":
            return kept
        if kernel.in_pieces:
            kept += output
        return kept + heads * (kernel.kept_bytes * self.seq or max(e, 4))

    @property
    def outside(self) -> int:
        """Tokens of a rank outside attention and MLP."""
        tokens = self.batch * self.seq
        if self.sequence_parallel:
            return tokens // self.tp
        return tokens

    def norm_bytes(self, features: int) -> int:
        """Returns the bytes that a norm keeps of a vector of so many features, beside its
        output."""
        kept = features * self.item_bytes
        wide = max(self.item_bytes, 4)
        if self.shape.layer_norm:
            return kept + 2 * wide
        if self.fused_norm:
            return kept + wide
        return 2 * features * wide + wide

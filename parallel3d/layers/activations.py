"""What one transformer block keeps of its forward for its backward, to the byte: the formula beside the layers that it
is of. A test compares it with what autograd saves. No torch here.

After Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), for a pre-norm block of RMSNorm, attention by a tiled
kernel, and a gated MLP, without dropout. Bytes of a microbatch of t = B S tokens, a number taking e bytes, and
w = max(e, 4) where a norm or a softmax computes with it; n = tp, r = n with sequence parallelism, else 1:

    each of two norms      its input e D, inverse root mean square w, output (the next product's input) e D
                           by operators of torch (CPUs): input w D, normalised input w D, w, and output e D     t / r
    attention              q e H K, k and v 2 e G K, its output (the next product's input) e H K                t / n
                           its softmax, unless recomputed (selective): w H                                      t / n
    MLP                    gate, up, act(gate), their product: 4 e F                                            t / n
    whole block recomputed its input e D, nothing else                                                          t / r

where ranks outnumber key-value heads, G = n. Rotary tables are the model's, one for all blocks, and not counted.
"""

from __future__ import annotations

from typing import Literal


def activation_bytes(
    *,
    batch: int,
    seq: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn_hidden: int,
    item_bytes: int,
    head_dim: int | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
    fused_norm: bool = True,
) -> int:
    """Bytes on one tp rank for one microbatch [batch, seq]. `fused_norm`: torch has a kernel for RMSNorm (GPUs)."""
    tokens = batch * seq
    tokens_outside = tokens // tp if sequence_parallel else tokens
    if recompute == "full":
        return tokens_outside * hidden * item_bytes
    wide_bytes = max(item_bytes, 4)
    if fused_norm:
        norm_bytes = 2 * hidden * item_bytes + wide_bytes
    else:
        norm_bytes = hidden * (2 * wide_bytes + item_bytes) + wide_bytes
    dim = head_dim or hidden // heads
    own_heads, own_kv_heads = heads // tp, max(kv_heads // tp, 1)
    attention_bytes = (2 * own_heads + 2 * own_kv_heads) * dim * item_bytes
    if recompute == "none":
        attention_bytes += own_heads * wide_bytes
    mlp_bytes = 4 * ffn_hidden // tp * item_bytes
    return tokens_outside * 2 * norm_bytes + tokens * (attention_bytes + mlp_bytes)

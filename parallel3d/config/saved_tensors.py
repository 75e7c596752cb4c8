"""Tensors that blocks of Hugging Face Transformers save for the backward pass, by family.

The numbers are in saved_tensors.yaml. They are the same in 16 bits and in float32. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from parallel3d.config.attention_kernels import AttentionKernel

_TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, kw_only=True)
class SavedTensors:
    """Numbers of tensors, by their features per token. A `wide` one is float32, others have the
    compute dtype. The defaults are those of Llama."""

    inputs: int = 2  # hidden; inputs of matmuls, which sequence parallelism gathers
    hidden: int = 2
    hidden_wide: int = 2
    query: int = 2  # all query heads of a rank
    query_wide: int = 0
    key: int = 2  # all key-value heads of a rank
    key_wide: int = 0
    ffn: int = 4
    # Matrices of hidden x ffn, and of hidden x (query + 2 key), in a packed weight. With tp, each
    # microbatch saves a copy of the rank's parts.
    packed_ffn: int = 0
    packed_qkv: int = 0
    score_bytes: int = 0  # per score, or 0 if the attention kernel saves no scores
    has_mask: bool = False  # True if also layers without a window save a mask.
    splits_attention: bool = True  # False if each tp rank computes all heads.
    logits: int = 1  # 2 with a soft cap

    @property
    def kernel(self) -> AttentionKernel:
        """Attention with linear memory, or one that saves scores. Then the gradients of the softmax
        and of the scores, without a copy in 16 bits, exist at the peak of its backward pass."""
        return AttentionKernel(
            "flash", kept_bytes=self.score_bytes, forward_bytes=3 * self.score_bytes // 4
        )

    def norm_bytes(self, hidden: int, item_bytes: int) -> int:
        """Returns the bytes per token of all norms of a block, without the inputs of matmuls."""
        return hidden * (self.hidden * item_bytes + self.hidden_wide * max(item_bytes, 4))

    def attention_bytes(self, query: int, key: int, item_bytes: int) -> int:
        """Returns the bytes per token for a number of features of queries and of keys."""
        kept = item_bytes * (self.query * query + self.key * key)
        return kept + max(item_bytes, 4) * (self.query_wide * query + self.key_wide * key)


@cache
def saved_tensors(family: str) -> SavedTensors:
    """Returns the entry of a `model_type`, or that of Llama."""
    return SavedTensors(**yaml.safe_load(_TABLE.read_text()).get(family, {}))

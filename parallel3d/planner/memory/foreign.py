"""Bytes that a block of Hugging Face Transformers saves for its backward pass."""

from __future__ import annotations

from parallel3d.config.recipe import BlockRecompute
from parallel3d.planner.memory.activations import BlockActivations


class ForeignBlock(BlockActivations):
    """Activations of a block of the family that `shape.saved` describes."""

    def bytes(self, recompute: BlockRecompute = "none") -> int:
        shape = self.shape
        saved = shape.saved
        assert saved is not None
        item = self.item_bytes
        hidden = shape.hidden
        if recompute == "full":
            return self.outside * hidden * item
        copied = 0  # Columns of weights.
        if self.tp > 1:
            copied = saved.packed_ffn * shape.ffn_hidden
            if recompute == "none":
                copied += saved.packed_qkv * (shape.query_hidden + 2 * shape.kv_hidden)
        inner = saved.ffn * shape.ffn_hidden // self.tp
        if shape.experts:  # Each tp rank has a row for every choice.
            inner = shape.experts.per_token * (2 * hidden + saved.ffn * shape.experts.hidden)
        norms = self.outside * saved.norm_bytes(hidden, item)
        inputs = saved.inputs
        if self.sequence_parallel:  # Each half gathers its own.
            inputs = 2
        kept = item * (inputs * hidden + inner) + self.attention_bytes(recompute)
        weights = item * hidden * copied // self.tp
        return norms + weights + self.tokens * kept

    def norm_bytes(self, features: int) -> int:
        assert self.shape.saved is not None
        return self.shape.saved.norm_bytes(features, self.item_bytes) // self.shape.block_norms

    def attention_bytes(self, recompute: BlockRecompute) -> int:
        shape = self.shape
        saved = shape.saved
        if recompute != "none" or saved is None:
            return 0
        tp = self.tp if saved.splits_attention else 1
        heads = shape.heads // tp
        query = heads * shape.head_dim
        key = max(shape.kv_heads // tp, 1) * shape.head_dim
        kept = saved.attention_bytes(query, key, self.item_bytes)
        if self.attention.kept_bytes:
            return kept + heads * self.seq * self.attention.kept_bytes
        masked = shape.windowed_layers if self.seq >= (shape.window or 0) else 0
        if saved.has_mask:
            masked = shape.layers
        # Keys and values are repeated for a mask.
        mask = self.item_bytes * (self.seq + saved.key * (query - key))
        return kept + heads * max(self.item_bytes, 4) + mask * masked // shape.layers

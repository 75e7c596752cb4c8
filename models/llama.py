"""Llama (Touvron et al. 2023, arXiv 2302.13971), with grouped-query attention of Llama 2 and 3.

With `rope_scaling` it is Llama 3.1, with `qkv_bias` Qwen 2, with `qk_norm` Qwen 3, with `window`
Mistral.

Shapes: B batch, S sequence, D hidden, H heads, G key/value heads, K head dim, F ffn, V vocabulary,
n = tp.

    embed               ids [B, S] -> [B, S, D]                  weight [V / n, D]
    layers.i.attention  [B, S, D] -> [B, S, D]                   q [H K / n, D], k and v [G K / n, D], o [D, H K / n]
    layers.i.mlp        [B, S, D] -> [B, S, F / n] -> [B, S, D]  gate and up [F / n, D], down [D, F / n]
    norm, head          [B, S, D] -> logits [B, S, V / n]        [D], [V / n, D]
"""  # noqa: E501

from __future__ import annotations

from functools import partial

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.attention import AttentionOptions
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import ParallelContext
from parallel3d.layers.positions import RotaryEmbedding
from parallel3d.layers.vocabulary import VocabParallelEmbedding
from parallel3d.models.decoder import Decoder, DecoderParts


class Llama(Decoder):
    """Decoder with rotary positions, RMSNorm and SwiGLU."""

    def parts(self, config: ModelConfig, context: ParallelContext) -> DecoderParts:
        """Returns the parts of a Llama. All blocks share one table of rotary angles."""
        embed = VocabParallelEmbedding(config.vocab, config.hidden, tp=context)
        return DecoderParts(
            embed=embed,
            token_weight=embed.weight,
            norm=partial(RMSNorm, config.hidden, eps=config.norm_eps, tp=context),
            rotary=RotaryEmbedding(
                config.head_size, theta=config.rope_theta, scaling=config.rope_scaling
            ),
            attention=AttentionOptions(
                head_dim=config.head_size,
                bias=config.qkv_bias,
                qk_norm=config.qk_norm,
                norm_eps=config.norm_eps,
                window=config.window,
                dropout=config.attention_dropout,
            ),
            activation="swiglu",
        )

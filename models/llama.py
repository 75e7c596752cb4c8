"""Llama (Touvron et al. 2023, arXiv 2302.13971; grouped-query attention as in Llama 2 and 3), written with the layers.
With `qkv_bias` Qwen 2, with `qk_norm` Qwen 3, with `window` Mistral."""

from __future__ import annotations

from parallel3d.config.recipe import BlockRecompute, ModelConfig
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.init import normal
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.rotary import RotaryEmbedding
from parallel3d.models.decoder import Block, Decoder, Parts, Placed, output_init, residual_dropout


class Llama(Decoder):
    """A decoder with rotary positions, RMSNorm and SwiGLU."""

    def parts(self, config: ModelConfig, placed: Placed) -> Parts:
        D, V = config.hidden, config.vocab
        embed = VocabParallelEmbedding(V, D, init=normal(config.init_std), **placed)
        rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        return Parts(
            embed=embed,
            token_weight=embed.weight,
            block=lambda index, recompute: llama_block(config, index, rotary, placed, recompute),
            norm=RMSNorm(D, eps=config.norm_eps, **placed),
        )


def llama_block(
    config: ModelConfig, index: int, rotary: RotaryEmbedding, placed: Placed, recompute: BlockRecompute
) -> Block:
    """Block `index` of the whole model; the model's blocks share one `rotary`."""
    D, init, name = config.hidden, normal(config.init_std), f"layers.{index}"
    return Block(
        attention_norm=RMSNorm(D, eps=config.norm_eps, **placed),
        attention=ParallelAttention(
            D,
            config.heads,
            config.key_value_heads,
            rotary=rotary,
            bias=config.qkv_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            window=config.window,
            dropout=config.attention_dropout,
            name=f"{name}.attention",
            recompute=recompute == "selective",
            init=init,
            output_init=output_init(config),
            **placed,
        ),
        attention_dropout=residual_dropout(config, f"{name}.attention.output", placed),
        mlp_norm=RMSNorm(D, eps=config.norm_eps, **placed),
        mlp=ParallelMLP(D, config.ffn_hidden, init=init, output_init=output_init(config), **placed),
        mlp_dropout=residual_dropout(config, f"{name}.mlp.output", placed),
        recompute=recompute == "full",
    )

"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020, arXiv 2005.14165, without its sparse layers), written with
the layers: learned positions, LayerNorm, GELU, and biases on every linear layer but the head."""

from __future__ import annotations

from torch import Tensor, nn

from parallel3d.config.recipe import BlockRecompute, ModelConfig
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.init import normal
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.positions import LearnedPositions
from parallel3d.models.decoder import Block, Decoder, Parts, Placed, output_init, residual_dropout


class GPT(Decoder):
    """A decoder with learned positions, LayerNorm and GELU (its approximation by tanh, as GPT-2's own)."""

    def parts(self, config: ModelConfig, placed: Placed) -> Parts:
        embed = TokensAndPositions(config, placed)
        return Parts(
            embed=embed,
            token_weight=embed.tokens.weight,
            block=lambda index, recompute: gpt_block(config, index, placed, recompute),
            norm=LayerNorm(config.hidden, eps=config.norm_eps, **placed),
        )


class TokensAndPositions(nn.Module):
    """ids [B, S] -> [B, S, D] (or [B, S / n, D]): the sum of a token's and its position's embedding."""

    def __init__(self, config: ModelConfig, placed: Placed) -> None:
        super().__init__()
        assert config.max_positions is not None, "validation asks for it"
        init = normal(config.init_std)
        self.tokens = VocabParallelEmbedding(config.vocab, config.hidden, init=init, **placed)
        self.positions = LearnedPositions(config.max_positions, config.hidden, init=init, **placed)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.positions(self.tokens(ids))
        return y


def gpt_block(config: ModelConfig, index: int, placed: Placed, recompute: BlockRecompute) -> Block:
    """Block `index` of the whole model."""
    D, init, name = config.hidden, normal(config.init_std), f"layers.{index}"
    return Block(
        attention_norm=LayerNorm(D, eps=config.norm_eps, **placed),
        attention=ParallelAttention(
            D,
            config.heads,
            config.key_value_heads,
            bias=True,
            output_bias=True,
            dropout=config.attention_dropout,
            name=f"{name}.attention",
            recompute=recompute == "selective",
            init=init,
            output_init=output_init(config),
            **placed,
        ),
        attention_dropout=residual_dropout(config, f"{name}.attention.output", placed),
        mlp_norm=LayerNorm(D, eps=config.norm_eps, **placed),
        mlp=ParallelMLP(
            D,
            config.ffn_hidden,
            activation="gelu_tanh",
            bias=True,
            init=init,
            output_init=output_init(config),
            **placed,
        ),
        mlp_dropout=residual_dropout(config, f"{name}.mlp.output", placed),
        recompute=recompute == "full",
    )

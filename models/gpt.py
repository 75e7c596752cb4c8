"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020, arXiv 2005.14165, without sparse layers).

Learned positions, LayerNorm, GELU, and biases on every linear layer except the head.

Shapes: B batch, S sequence, D hidden, H heads, G key/value heads, K head dim, F ffn, V vocabulary,
n = tp.

    embed               ids [B, S] -> [B, S, D]                  tokens [V / n, D], positions [longest, D]
    layers.i.attention  [B, S, D] -> [B, S, D]                   q [H K / n, D], k and v [G K / n, D], o [D, H K / n]
    layers.i.mlp        [B, S, D] -> [B, S, F / n] -> [B, S, D]  up [F / n, D], down [D, F / n]
    norm, head          [B, S, D] -> logits [B, S, V / n]        [D], [V / n, D]
"""  # noqa: E501

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.attention import AttentionOptions
from parallel3d.layers.norm import LayerNorm
from parallel3d.layers.parameter import ParallelContext
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding
from parallel3d.models.decoder import Decoder, DecoderParts


class GPT(Decoder):
    """Decoder with learned positions, LayerNorm and GELU (GPT-2's tanh approximation)."""

    def parts(self, config: ModelConfig, context: ParallelContext) -> DecoderParts:
        """Returns the parts of a GPT."""
        embed = TokensAndPositions(config, context)
        return DecoderParts(
            embed=embed,
            token_weight=embed.tokens.weight,
            norm=partial(LayerNorm, config.hidden, eps=config.norm_eps, tp=context),
            attention=AttentionOptions(
                head_dim=config.head_size,
                bias=True,
                output_bias=True,
                dropout=config.attention_dropout,
            ),
            activation="gelu_tanh",
            mlp_bias=True,
        )


class TokensAndPositions(nn.Module):
    """Sum of token and position embeddings: ids, positions [B, S] -> [B, S, D] (or [B, S / n, D]).

    Default positions are 0, 1, ...
    """

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        super().__init__()
        assert config.max_positions is not None, "validation requires it"
        self.tokens = VocabParallelEmbedding(config.vocab, config.hidden, tp=context)
        self.positions = LearnedPositions(config.max_positions, config.hidden, tp=context)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        y: Tensor = self.positions(self.tokens(ids), positions)
        return y

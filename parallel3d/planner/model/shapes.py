"""The shape of a transformer, as much of it as memory and time depend on; `parameters` counts its parameters. Beside
`models/` it covers what the published runs trained: GPT with ALiBi positions, and Nemotron (squared ReLU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel3d.config.flops import block_weights
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError

FeedForward = Literal["swiglu", "gelu", "relu2"]
Positions = Literal["rope", "learned", "alibi", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # features of one head
    ffn_hidden: int
    vocab: int
    feed_forward: FeedForward = "swiglu"
    positions: Positions = "rope"
    position_rows: int = 0  # rows of a learned position table
    tied_embeddings: bool = False
    biases: bool = False  # on every linear layer (GPT)
    qkv_biases: bool = False  # on q, k and v alone (Qwen 2)
    qk_norm: bool = False  # RMSNorm of each head's queries and keys (Qwen 3)
    layer_norm: bool = False  # LayerNorm (weight and bias) in the place of RMSNorm (weight)
    embedding_norm: bool = False  # BLOOM's norm after the embedding

    @property
    def query_hidden(self) -> int:
        """Features of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Features of all keys (or all values)."""
        return self.kv_heads * self.head_dim

    @property
    def feed_forward_inputs(self) -> int:
        """Matrices that go from hidden to ffn_hidden: gate and up of SwiGLU, else one."""
        return 2 if self.feed_forward == "swiglu" else 1

    @property
    def block_weights(self) -> int:
        """The weights of one block's matrices, which a token is multiplied with."""
        matrices = self.feed_forward_inputs + 1
        return block_weights(
            hidden=self.hidden,
            query_hidden=self.query_hidden,
            kv_hidden=self.kv_hidden,
            ffn_hidden=self.ffn_hidden,
            ffn_matrices=matrices,
        )

    @property
    def norm_parameters(self) -> int:
        """The parameters of one norm over the hidden features."""
        return self.hidden * (2 if self.layer_norm else 1)


@dataclass(frozen=True, kw_only=True)
class StageSlice:
    """What one pipeline stage holds of the model."""

    layers: int
    embedding: bool
    head: bool


def from_config(config: ModelConfig) -> ModelShape:
    """Returns the shape of a recipe's `model` section. Raises ConfigError for a class of the user's, whose bytes and
    seconds nobody here knows."""
    if config.is_custom:
        raise ConfigError(
            f"model.architecture = {config.architecture}: the planner knows the memory and the time of llama and gpt, "
            "and not those of a class of your own; train a few steps, which print both, or plan with "
            "model.architecture=llama and its numbers for a rough idea"
        )
    is_gpt = config.architecture == "gpt"
    return ModelShape(
        name=config.name or config.architecture,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.key_value_heads,
        head_dim=config.head_size,
        ffn_hidden=config.ffn_hidden,
        vocab=config.vocab,
        feed_forward="gelu" if is_gpt else "swiglu",
        positions="learned" if is_gpt else "rope",
        position_rows=config.max_positions or 0,
        tied_embeddings=config.tied_embeddings,
        biases=is_gpt,
        qkv_biases=config.qkv_bias,
        qk_norm=config.qk_norm,
        layer_norm=is_gpt,
    )

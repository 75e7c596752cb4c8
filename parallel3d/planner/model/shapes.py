"""The shape of a transformer, as much of it as memory and time depend on; `parameters` counts its
parameters. Beside `models/` it covers what other frameworks train: GPT with ALiBi positions,
Nemotron (squared ReLU), Gemma, mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel3d.config.flops import attended_keys
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.model.experts import Experts, LatentAttention

FeedForward = Literal["swiglu", "geglu", "gelu", "relu2"]
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
    block_norms: int = 2  # norms of the hidden features in a block (Gemma 2 and 3 have four)
    qk_norm_whole: bool = False  # qk_norm is over all heads together (OLMoE)
    window: int | None = None  # most keys that a query sees in `windowed_layers` of the layers
    windowed_layers: int = 0
    experts: Experts | None = None  # a mixture has them in the place of one feed-forward part
    latent: LatentAttention | None = None
    # what this project's trainer does not have of it, in words; empty where it has everything
    lacks_module: str = ""

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
        if self.is_gated:
            return 2
        return 1

    @property
    def is_gated(self) -> bool:
        """Whether a gate multiplies the feed-forward part's features."""
        return self.feed_forward in ("swiglu", "geglu")

    @property
    def first_dense(self) -> int:
        """How many of a mixture's first layers have no experts."""
        if self.experts is None:
            return 0
        return self.experts.dense_layers

    @property
    def attention_hidden(self) -> int:
        """Features of all heads that a query and a key, or a score and a value, are multiplied
        over."""
        latent = self.latent
        if latent is None:
            return self.query_hidden
        return self.heads * (latent.turned + latent.plain + latent.value) // 2

    def attended(self, seq_len: int) -> float:
        """Counts the keys of a query as FLOPs count them, all of a causal sequence; the mean over
        the layers."""
        if self.window is None:
            return seq_len
        share = self.windowed_layers / self.layers
        return share * attended_keys(seq_len, self.window) + (1 - share) * seq_len

    @property
    def norm_vectors(self) -> int:
        """The parameters of one norm: its weight, and the bias of a LayerNorm."""
        if self.layer_norm:
            return 2
        return 1


@dataclass(frozen=True, kw_only=True)
class StageSlice:
    """What one pipeline stage holds of the model."""

    layers: int
    embedding: bool
    head: bool
    dense: int = 0  # layers of a mixture that have no experts

    def plus(self, other: StageSlice) -> StageSlice:
        return StageSlice(
            layers=self.layers + other.layers,
            embedding=self.embedding or other.embedding,
            head=self.head or other.head,
            dense=self.dense + other.dense,
        )


def from_config(config: ModelConfig) -> ModelShape:
    """Returns the shape of a recipe's `model` section. Raises ConfigError for a class of the
    user's, whose bytes and seconds nobody here knows."""
    if config.is_custom:
        raise ConfigError(
            f"model.architecture = {config.architecture}: the planner knows the memory and the "
            "time of llama and gpt, and not those of a class of your own; train a few steps, which "
            "print both, or plan with model.architecture=llama and its numbers for a rough idea"
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
        window=config.window,
        windowed_layers=0 if config.window is None else config.layers,
    )

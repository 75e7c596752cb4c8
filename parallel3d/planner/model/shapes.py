"""Model shapes: the sizes and options that memory and time depend on.

In addition to `models/`, they describe models that the trainer cannot build: GPT with ALiBi,
Nemotron (squared ReLU), Gemma and MoE models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from parallel3d.config.flops import attended_keys
from parallel3d.config.hugging_face import config_of, config_path
from parallel3d.config.recipe import ModelConfig
from parallel3d.config.saved_tensors import SavedTensors
from parallel3d.errors import ConfigError
from parallel3d.planner.model.experts import Experts, LatentAttention

FeedForward = Literal["swiglu", "geglu", "gelu", "relu2"]
Positions = Literal["rope", "learned", "alibi", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and options of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # Number of features per head.
    ffn_hidden: int
    vocab: int
    feed_forward: FeedForward = "swiglu"
    positions: Positions = "rope"
    position_rows: int = 0  # Number of rows of a learned position table.
    tied_embeddings: bool = False
    biases: bool = False  # True if all linear layers have biases (GPT).
    qkv_biases: bool = False  # True if only q, k and v have biases (Qwen 2).
    qk_norm: bool = False  # True if each head of queries and keys has an RMSNorm (Qwen 3).
    layer_norm: bool = False  # True if norms are LayerNorms with weight and bias, not RMSNorms.
    embedding_norm: bool = False  # True if a norm follows the embedding (BLOOM).
    block_norms: int = 2  # Number of norms per block. Gemma 2 and 3 have four.
    qk_norm_whole: bool = False  # True if queries and keys have an RMSNorm over all heads (OLMoE).
    window: int | None = None  # Attention window, in tokens, of `windowed_layers` of the layers.
    windowed_layers: int = 0
    experts: Experts | None = None  # None: a dense model.
    latent: LatentAttention | None = None
    saved: SavedTensors | None = None  # None: blocks of parallel3d, not of Transformers.
    # Other parts that the trainer cannot build, or "".
    lacks_module: str = ""

    def __hash__(self) -> int:  # A cache key. That of all fields takes ten times as long.
        return hash((self.name, self.layers, self.vocab))

    @property
    def query_hidden(self) -> int:
        """Output features of the query projection, over all heads."""
        return self.heads * self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Output features of the key projection, over all key-value heads. The value projection has
        as many.
        """
        return self.kv_heads * self.head_dim

    @property
    def feed_forward_inputs(self) -> int:
        """Number of matrices from hidden to ffn_hidden: 2 for gated activations, else 1."""
        if self.is_gated:
            return 2
        return 1

    @property
    def is_gated(self) -> bool:
        """True if a gate multiplies the features of the MLP."""
        return self.feed_forward in ("swiglu", "geglu")

    @property
    def first_dense(self) -> int:
        """Number of layers at the start of an MoE model that have no experts."""
        if self.experts is None:
            return 0
        return self.experts.dense_layers

    @property
    def attention_hidden(self) -> int:
        """Mean number of features in QK^T and in the matmul with V, over all heads."""
        latent = self.latent
        if latent is None:
            return self.query_hidden
        return self.heads * (latent.turned + latent.plain + latent.value) // 2

    def attended(self, seq_len: int) -> float:
        """Returns the number of keys per query assumed when counting FLOPs (`attended_keys`),
        averaged over the layers."""
        if self.window is None:
            return seq_len
        share = self.windowed_layers / self.layers
        return share * attended_keys(seq_len, self.window) + (1 - share) * seq_len

    @property
    def norm_vectors(self) -> int:
        """Number of parameter vectors of a norm: the weight and, for a LayerNorm, the bias."""
        if self.layer_norm:
            return 2
        return 1


class StageSlice(NamedTuple):
    """The part of the model in a pipeline stage or on a pipeline rank."""

    layers: int = 0
    embedding: bool = False
    head: bool = False
    dense: int = 0  # Number of layers without experts, in an MoE model.

    def plus(self, other: StageSlice) -> StageSlice:
        return StageSlice(
            self.layers + other.layers,
            self.embedding or other.embedding,
            self.head or other.head,
            self.dense + other.dense,
        )


def from_config(config: ModelConfig) -> ModelShape:
    """Returns the shape of a recipe's `model` section. Raises ConfigError for a custom class."""
    if config.architecture == "transformers":
        # imported here, because it imports this module
        from parallel3d.planner.model.hf_config import shape_of_json

        return shape_of_json(config_of(config), config_path(config))
    if config.is_custom:
        raise ConfigError(
            f"model.architecture = {config.architecture}: the planner supports llama, gpt and "
            "transformers, not custom classes; for a rough estimate plan with "
            "model.architecture=llama and the same sizes, or train a few steps, which print time "
            "and memory"
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
        experts=Experts(**vars(config.experts)) if config.experts else None,
    )

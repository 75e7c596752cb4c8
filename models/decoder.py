"""Common base of the models: a decoder of pre-norm blocks between an embedding and a head.

A model defines its parts in `Decoder.parts`. This module assembles them.

Shapes: B batch, S sequence, D hidden, V vocabulary, n = tp. Activations between blocks are [B, S,
D], or [B, S / n, D] under sequence parallelism. A pipeline stage is a Decoder without some of its
parts (`pipeline.stage.cut`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import BlockRecompute, ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.dropout import Dropout
from parallel3d.layers.experts import ParallelExperts
from parallel3d.layers.mlp import Activation, ParallelMLP
from parallel3d.layers.parameter import ParallelContext, normal
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.recompute import recomputed
from parallel3d.layers.vocabulary import VocabParallelHead, ends_with_head
from parallel3d.mesh import Axis


@dataclass(frozen=True)
class DecoderParts:
    """Parts of a decoder, except its head and the sizes in its config.

    Args:
        embed: Embedding, ids [B, S] -> [B, S, D], or [B, S / n, D] under sequence parallelism.
            Without `rotary` it also receives positions [B, S] if sequences are packed.
        token_weight: Parameter [V / n, D] of `embed` that a tied head shares.
        norm: Function that creates a norm. Each block has two, and one follows the last block.
        attention: Options of the attention in all blocks. `name` and `recompute` are set per block.
        activation: Activation of the MLP.
        rotary: Rotary embedding. None means that `embed` adds positions.
        mlp_bias: If True, the linear layers of the MLP have biases.
        attention_class: Class of the attention, called like `ParallelAttention`.

    Example:
        >>> embed = parallel3d.VocabParallelEmbedding(config.vocab, config.hidden, tp=context)
        >>> parts = parallel3d.DecoderParts(
        ...     embed=embed,
        ...     token_weight=embed.weight,
        ...     norm=partial(parallel3d.RMSNorm, config.hidden, tp=context),
        ...     attention=parallel3d.AttentionOptions(head_dim=config.head_size),
        ...     activation="gelu",
        ... )
    """

    embed: nn.Module
    token_weight: Tensor
    norm: Callable[[], nn.Module]
    attention: AttentionOptions
    activation: Activation
    rotary: RotaryEmbedding | None = None
    mlp_bias: bool = False
    attention_class: type[ParallelAttention] = ParallelAttention


@dataclass(frozen=True)
class NoOptions:
    """Options of a model without options."""


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each with a residual connection.

    Shapes: x and the result [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence
    parallelism. The forward pass also takes `key` [batch], the dropout key, and `documents`, within
    which attention stays if sequences are packed.

    Args:
        config: Model config.
        context: Parallel context of the layers.
        parts: Parts of the model.
        index: Index of the block in the full model.
        selective: If True, the attention recomputes its intermediate results in the backward pass.

    Example:
        >>> class ParallelBlock(parallel3d.Block):
        ...     def forward(self, x, key=None, documents=None):
        ...         attended = self.attention(self.attention_norm(x), documents=documents, key=key)
        ...         return x + attended + self.mlp(self.mlp_norm(x))
        >>> class Model(parallel3d.Decoder):
        ...     block_class = ParallelBlock
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        parts: DecoderParts,
        index: int,
        *,
        selective: bool,
    ) -> None:
        super().__init__()
        D, name = config.hidden, f"layers.{index}"
        self.attention_norm = parts.norm()
        self.attention = parts.attention_class(
            D,
            config.heads,
            config.key_value_heads,
            rotary=parts.rotary,
            tp=context,
            options=replace(parts.attention, name=f"{name}.attention", recompute=selective),
        )
        self.attention_dropout = residual_dropout(config, f"{name}.attention.output", context)
        self.mlp_norm = parts.norm()
        self.mlp: nn.Module
        if config.experts is not None and config.has_experts(index):
            options = dict(vars(config.experts))
            sizes = [options.pop(key) for key in ("hidden", "count", "per_token")]
            self.mlp = ParallelExperts(D, *sizes, tp=context, **options)
        else:
            self.mlp = ParallelMLP(
                D,
                config.ffn_hidden,
                activation=parts.activation,
                bias=parts.mlp_bias,
                tp=context,
            )
        self.mlp_dropout = residual_dropout(config, f"{name}.mlp.output", context)

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        # Without names for the results, which would stay alive during the MLP.
        x = x + self.attention_dropout(
            self.attention(self.attention_norm(x), documents=documents, key=key), key
        )
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), key)


class RecomputedBlock(nn.Module):
    """Mixin for blocks that save only x and recompute their activations in the backward pass.

    Hooks of the block, such as those of `fully_shard` and gradient reduction, stay outside and run
    once.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for part in self.modules():
            if isinstance(part, ParallelAttention):
                part.is_recomputed = True

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return self.compute(x, key, documents)
        y: Tensor = recomputed(self.compute, x, key, documents)
        return y

    def compute(self, x: Tensor, key: Tensor | None, documents: PackedDocuments | None) -> Tensor:
        """Runs the part that is recomputed and that `build_engine.compile_blocks` compiles."""
        y: Tensor = super().forward(x, key, documents)
        return y


def recomputed_block(block: type[Block]) -> type[Block]:
    """Returns a subclass of `block` that is recomputed in the backward pass."""
    return type(f"Recomputed{block.__name__}", (RecomputedBlock, block), {})


class Decoder(nn.Module):
    """Decoder model: ids [batch, seq] -> logits [batch, seq, vocab / tp].

    A stage without `embed` takes activations instead of ids. A stage without `head` returns
    activations. Every stage also receives `key` [batch], the dropout key (`dropout_key`), and
    `documents`, within which attention stays.

    Subclass it and define `parts`. Set `block_class` to use another kind of block, and `Options` to
    a dataclass of the keys in `model.options`.

    Args:
        config: Model config.
        tp: Tensor-parallel axis.
        sequence_parallel: If True, activations between layers are split along the sequence.
        recompute: "none", "full" for whole blocks, or "selective" for attention only.
        recompute_every: Recomputes only every n-th block, beginning with the first.
        device: Device of the parameters.
        cp: Context-parallel axis.
        ep: Expert-parallel axis.

    Example:
        >>> class Model(parallel3d.Decoder):
        ...     def parts(self, config, context):
        ...         embed = parallel3d.VocabParallelEmbedding(
        ...             config.vocab, config.hidden, tp=context
        ...         )
        ...         return parallel3d.DecoderParts(
        ...             embed=embed,
        ...             token_weight=embed.weight,
        ...             norm=partial(parallel3d.RMSNorm, config.hidden, tp=context),
        ...             rotary=parallel3d.RotaryEmbedding(config.head_size),
        ...             attention=parallel3d.AttentionOptions(head_dim=config.head_size),
        ...             activation="swiglu",
        ...         )
    """

    block_class: type[Block] = Block
    Options: type = NoOptions

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        recompute: BlockRecompute = "none",
        recompute_every: int = 1,
        device: torch.device | str | None = None,
        cp: DeviceMesh | Axis | None = None,
        ep: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        # Row-parallel weights start smaller, or the residual stream would grow with depth (Radford
        # et al. 2019, section 2.3).
        context = ParallelContext(
            tp,
            sequence_parallel,
            device,
            cp=cp,
            ep=ep,
            init=normal(config.init_std),
            row_init=normal(config.init_std / math.sqrt(2 * config.layers)),
        )
        parts = self.parts(config, context)
        head = VocabParallelHead(config.hidden, config.vocab, tp=context)
        if config.tied_embeddings:
            head.weight = parts.token_weight
        self.embed: nn.Module | None = parts.embed
        self.rotary = parts.rotary
        # Ranks among which the sequence of an activation between blocks is split.
        self.ranks_of_sequence = head.sequence_part.ranks
        if sequence_parallel:
            self.ranks_of_sequence *= head.axis.size
        self.dropout = residual_dropout(config, "embed", context)
        self.layers = nn.ModuleDict()
        blocks = {"full": recomputed_block(self.block_class)}
        for index in range(config.layers):
            own = recompute if index % recompute_every == 0 else "none"
            block = blocks.get(own, self.block_class)
            self.layers[str(index)] = block(
                config, context, parts, index, selective=own == "selective"
            )
        self.norm: nn.Module | None = parts.norm()
        self.head: nn.Module | None = head

    def parts(self, config: ModelConfig, context: ParallelContext) -> DecoderParts:
        """Returns the parts of this model. Every subclass defines it."""
        raise ConfigError(
            f"model.architecture = {config.architecture}: must define parts(config, context); see "
            "models/llama.py for an example"
        )

    @ends_with_head
    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        if self.embed is not None:
            learned = self.rotary is None and documents is not None
            positions = (documents.positions,) if learned else ()  # type: ignore[union-attr]
            x = self.dropout(self.embed(x, *positions), key)
        # Before the blocks, so that a compiled block does not build the table in every call.
        if self.rotary is not None:
            self.rotary.make_table(x.shape[1] * self.ranks_of_sequence, x)
        for block in self.layers.values():
            x = block(x, key, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def residual_dropout(config: ModelConfig, name: str, context: ParallelContext) -> Dropout:
    split_dim = 1 if context.sequence_parallel else None
    return Dropout(config.dropout, name=name, tp=context.tp, split_dim=split_dim, cp=context.cp)

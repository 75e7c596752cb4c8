"""What the models of this folder have in common: a decoder of pre-norm blocks, one after the other,
between an embedding and a head. A model says what it is made of (`Decoder.parts`); how the parts
are put together is here.

Shapes: B batch, S sequence, D hidden, V vocabulary, n = tp. Between blocks an activation is [B, S,
D], or [B, S / n, D] with sequence parallelism. A pipeline stage is a Decoder without some of its
parts (`pipeline.stage.cut`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

from parallel3d.config.recipe import BlockRecompute, ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.dropout import Dropout
from parallel3d.layers.mlp import Activation, ParallelMLP
from parallel3d.layers.parameter import ParallelContext, normal
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.vocabulary import VocabParallelHead, ends_with_head


@dataclass(frozen=True)
class DecoderParts:
    """What a decoder is made of, beside its head and the sizes that its config gives.

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

    # ids [B, S] -> [B, S, D] (or [B, S / n, D]). Without `rotary` it takes positions [B, S], too.
    embed: nn.Module
    token_weight: Tensor  # [V / n, D], a parameter of `embed` that a tied head shares
    # makes one of the norms: two in each block, one after the last block
    norm: Callable[[], nn.Module]
    attention: AttentionOptions  # the same in all blocks but for `name` and `recompute`
    activation: Activation
    rotary: RotaryEmbedding | None = None
    mlp_bias: bool = False


@dataclass(frozen=True)
class NoOptions:
    """The options of a model that has none."""


class Block(nn.Module):
    """Block `index` of the whole model. x [B, S, D] (or [B, S / n, D]) -> the same: attention, then
    MLP, each computed from the norm of x and added to x through a dropout, whose key [B] comes with
    x, as do the documents that attention stays within, where sequences are packed.

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
        self.attention = ParallelAttention(
            D,
            config.heads,
            config.key_value_heads,
            rotary=parts.rotary,
            tp=context,
            options=replace(parts.attention, name=f"{name}.attention", recompute=selective),
        )
        self.attention_dropout = residual_dropout(config, f"{name}.attention.output", context)
        self.mlp_norm = parts.norm()
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
        attended = self.attention(self.attention_norm(x), documents=documents, key=key)
        x = x + self.attention_dropout(attended, key)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), key)


class RecomputedBlock(nn.Module):
    """Mixed into a class of blocks (`recomputed`), it makes a block that keeps x alone for the
    backward, which computes the block's activations a second time (Chen et al. 2016, arXiv
    1604.06174). Hooks of the block (`fully_shard`'s, gradient reduction) stay outside and run
    once."""

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return self.compute(x, key, documents)
        # Dropout draws no random numbers beyond its key: no generator has to be restored.
        y: Tensor = checkpoint(
            self.compute, x, key, documents, use_reentrant=False, preserve_rng_state=False
        )
        return y

    def compute(self, x: Tensor, key: Tensor | None, documents: PackedDocuments | None) -> Tensor:
        """Computes what is recomputed. `build_engine.compile_blocks` compiles only this part of the
        block."""
        y: Tensor = super().forward(x, key, documents)
        return y


def recomputed(block: type[Block]) -> type[Block]:
    """Returns the class of blocks that are recomputed in the backward and else are `block`."""
    return type(f"Recomputed{block.__name__}", (RecomputedBlock, block), {})


class Decoder(nn.Module):
    """ids [B, S] -> logits [B, S, V / n]. A stage without `embed` takes activations, a stage
    without `head` gives them. `key` [B], of the microbatch's dropout
    (`layers.dropout.dropout_key`), and `documents`, which attention is to stay within, go to every
    stage. One block in `recompute_every` is recomputed as `recompute` says, the others are not
    recomputed.

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

    block_class: type[Block] = Block  # a model with blocks of another kind names them here
    Options: type = NoOptions  # the dataclass of what the model reads of `model.options`

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        recompute: BlockRecompute = "none",
        recompute_every: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        # What is added to x grows with depth unless it starts smaller (Radford et al. 2019, section
        # 2.3).
        context = ParallelContext(
            tp,
            sequence_parallel,
            device,
            init=normal(config.init_std),
            row_init=normal(config.init_std / math.sqrt(2 * config.layers)),
        )
        parts = self.parts(config, context)
        head = VocabParallelHead(config.hidden, config.vocab, tp=context)
        if config.tied_embeddings:
            head.weight = parts.token_weight
        self.embed: nn.Module | None = parts.embed
        self.rotary = parts.rotary
        self.ranks_of_sequence = head.axis.size if sequence_parallel else 1
        self.dropout = residual_dropout(config, "embed", context)
        self.layers = nn.ModuleDict()
        blocks = {"full": recomputed(self.block_class)}
        for index in range(config.layers):
            own = recompute if index % recompute_every == 0 else "none"
            block = blocks.get(own, self.block_class)
            self.layers[str(index)] = block(
                config, context, parts, index, selective=own == "selective"
            )
        self.norm: nn.Module | None = parts.norm()
        self.head: nn.Module | None = head

    def parts(self, config: ModelConfig, context: ParallelContext) -> DecoderParts:
        """Returns the parts that make this model what it is. Every model has its own."""
        raise ConfigError(
            f"model.architecture = {config.architecture}: has no method parts, which says what a "
            "Decoder is made of; try models/llama.py's"
        )

    @ends_with_head
    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        if self.embed is not None:
            learned = self.rotary is None and documents is not None
            positions = (documents.positions,) if learned else ()  # type: ignore[union-attr]
            x = self.dropout(self.embed(x, *positions), key)
        # before the blocks, so that a compiled one does not make the table in every call
        if self.rotary is not None:
            self.rotary.make_table(x.shape[1] * self.ranks_of_sequence, x)
        for block in self.layers.values():
            x = block(x, key, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def residual_dropout(config: ModelConfig, name: str, context: ParallelContext) -> Dropout:
    """A dropout of activations between the layers, which sequence parallelism splits along the
    sequence."""
    split_dim = 1 if context.sequence_parallel else None
    return Dropout(config.dropout, name=name, tp=context.tp, split_dim=split_dim)

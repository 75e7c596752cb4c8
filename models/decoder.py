"""What the models here have in common: a decoder of pre-norm blocks, one after the other, between an embedding and a
head. A model says what these are (`parts`); how they follow each other is here.

Shapes: B batch, S sequence, D hidden, V vocabulary, n = tp. Between blocks an activation is [B, S, D], or [B, S / n, D]
with sequence parallelism. A pipeline stage is a Decoder without some of its parts (`pipeline.stage.cut`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import BlockRecompute, ModelConfig
from parallel3d.layers.dropout import Dropout
from parallel3d.layers.head import VocabParallelHead
from parallel3d.layers.init import normal
from parallel3d.layers.parameter import Initializer
from parallel3d.layers.recompute import Recomputed


class Placed(TypedDict):
    """Where a layer is: what all of a model's layers are given alike."""

    tp: DeviceMesh | None
    sequence_parallel: bool
    device: torch.device | str | None


class Block(nn.Module):
    """x [B, S, D] (or [B, S / n, D]) -> the same: attention, then MLP, each on the norm of x and added to x. What is
    added passes through dropout, whose key [B] comes with x. `recompute`: only x is kept for the backward."""

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: nn.Module,
        attention_dropout: Dropout,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        mlp_dropout: Dropout,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = attention_dropout
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = mlp_dropout
        if recompute:
            draws = any(isinstance(part, Dropout) and part.p > 0.0 for part in self.modules())
            self.forward = Recomputed(self.forward, draws_dropout=draws)  # type: ignore[method-assign]

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), key=key), key)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), key)


@dataclass(frozen=True)
class Parts:
    """What a decoder is made of, beside its head."""

    embed: nn.Module  # ids [B, S] -> [B, S, D] (or [B, S / n, D])
    token_weight: nn.Parameter  # [V / n, D], of `embed`: what a tied head has, too
    block: Callable[[int, BlockRecompute], Block]  # of an index in the whole model
    norm: nn.Module  # of what the last block gives


class Decoder(nn.Module):
    """ids [B, S] -> logits [B, S, V / n]; a stage without `embed` takes, without `head` gives, activations. `key` [B],
    of the microbatch's dropout, goes to every stage (`layers.dropout.dropout_key`). Of `recompute_every` blocks one is
    recomputed as `recompute` says, the others not at all."""

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
        placed = Placed(tp=tp, sequence_parallel=sequence_parallel, device=device)
        parts = self.parts(config, placed)
        head = VocabParallelHead(config.hidden, config.vocab, init=normal(config.init_std), **placed)
        if config.tied_embeddings:
            head.weight = parts.token_weight
        self.embed: nn.Module | None = parts.embed
        self.dropout = residual_dropout(config, "embed", placed)
        self.layers = nn.ModuleDict(
            {
                str(index): parts.block(index, recompute if index % recompute_every == 0 else "none")
                for index in range(config.layers)
            }
        )
        self.norm: nn.Module | None = parts.norm
        self.head: nn.Module | None = head

    def parts(self, config: ModelConfig, placed: Placed) -> Parts:
        """What each model says of itself."""
        raise NotImplementedError

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.dropout(self.embed(x), key)
        for block in self.layers.values():
            x = block(x, key)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def residual_dropout(config: ModelConfig, name: str, placed: Placed) -> Dropout:
    """Of activations between the layers, which sequence parallelism splits."""
    split_dim = 1 if placed["sequence_parallel"] else None
    return Dropout(config.dropout, name=name, tp=placed["tp"], split_dim=split_dim)


def output_init(config: ModelConfig) -> Initializer:
    """What is added to x grows with depth unless it starts smaller (Radford et al. 2019, section 2.3)."""
    return normal(config.init_std / math.sqrt(2 * config.layers))

"""Llama (Touvron et al. 2023, arXiv 2302.13971; grouped-query attention as in Llama 2 and 3), written with the layers.

Shapes: B batch, S sequence, D hidden, V vocabulary, n = tp. Between blocks an activation is [B, S, D], or [B, S / n, D]
with sequence parallelism. A pipeline stage is a Llama without some of its parts (`pipeline.stage.cut`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

from parallel3d.config import ModelConfig, Recompute
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.embedding import VocabParallelEmbedding
from parallel3d.layers.head import VocabParallelHead
from parallel3d.layers.init import normal
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.rotary import RotaryEmbedding


class Llama(nn.Module):
    """ids [B, S] -> logits [B, S, V / n]; a stage without `embed` takes, without `head` gives, activations."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        D, V, init = config.hidden, config.vocab, normal(config.init_std)
        self.embed: VocabParallelEmbedding | None = VocabParallelEmbedding(
            V, D, tp=tp, sequence_parallel=sequence_parallel, init=init, device=device
        )
        rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(
                    config, rotary, tp, sequence_parallel=sequence_parallel, recompute=recompute, device=device
                )
                for i in range(config.layers)
            }
        )
        self.norm: RMSNorm | None = RMSNorm(
            D, eps=config.norm_eps, tp=tp, sequence_parallel=sequence_parallel, device=device
        )
        self.head: VocabParallelHead | None = VocabParallelHead(
            D, V, tp=tp, sequence_parallel=sequence_parallel, init=init, device=device
        )
        if config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Block(nn.Module):
    """x [B, S, D] (or [B, S / n, D]) -> the same: attention, then MLP, each on the norm of x and added to x."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        tp: DeviceMesh | None,
        *,
        sequence_parallel: bool,
        recompute: Recompute,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.recompute = recompute == "full"
        D, init = config.hidden, normal(config.init_std)
        # What is added to x grows with depth unless it starts smaller (Radford et al. 2019, section 2.3).
        output_init = normal(config.init_std / math.sqrt(2 * config.layers))
        self.attention_norm = RMSNorm(D, eps=config.norm_eps, tp=tp, sequence_parallel=sequence_parallel, device=device)
        self.attention = ParallelAttention(
            D,
            config.heads,
            config.key_value_heads,
            rotary=rotary,
            recompute=recompute == "selective",
            tp=tp,
            sequence_parallel=sequence_parallel,
            init=init,
            output_init=output_init,
            device=device,
        )
        self.mlp_norm = RMSNorm(D, eps=config.norm_eps, tp=tp, sequence_parallel=sequence_parallel, device=device)
        self.mlp = ParallelMLP(
            D,
            config.ffn_hidden,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init=init,
            output_init=output_init,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._residual, x, use_reentrant=False, preserve_rng_state=False)
            return y
        return self._residual(x)

    def _residual(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

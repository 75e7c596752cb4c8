"""A Llama and a training loop in one process in plain torch: a reference for tests and benchmarks.

It shares only `ModelConfig` and parameter names with parallel3d's layers, so an error in the layers
cannot hide in their reference. On a pipeline stage, `embed`, `norm` and `head` may be None and
`layers` incomplete.

Shapes: B batch, S sequence, D hidden, H heads, J key-value heads, K head dim, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.data.loader import Batch
from parallel3d.tools.check_layout.plain import adamw


class PlainRotary:
    """Cosines and sines of the rotary angles, [S, K] each, cached for the last sequence length."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self.cos = self.sin = torch.empty(0, 0)

    def rotate(self, x_BHSK: Tensor) -> Tensor:
        """Applies RoPE with Hugging Face's rotate-half: dim i is paired with dim i + K / 2."""
        length = x_BHSK.shape[2]
        device = x_BHSK.device
        if self.cos.shape[0] != length or self.cos.device != device:
            exponents = (
                torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
                / self.head_dim
            )
            positions = torch.arange(length, dtype=torch.float32, device=device)
            angles = torch.outer(positions, self.theta**-exponents)  # [S, K / 2]
            angles = torch.cat((angles, angles), dim=-1)  # [S, K]
            self.cos = angles.cos()
            self.sin = angles.sin()
        left, right = x_BHSK.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
        return x_BHSK * self.cos.to(x_BHSK.dtype) + turned * self.sin.to(x_BHSK.dtype)


class PlainAttention(nn.Module):
    """Causal attention, [B, S, D] to [B, S, D]. H / J query heads share a key-value head.

    The number of heads is that of the projections' outputs, because tensor parallelism splits them.
    """

    def __init__(self, config: ModelConfig, rotary: PlainRotary) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.grouped = config.key_value_heads != config.heads
        self.rotary = rotary
        self.q = nn.Linear(config.hidden, config.query_hidden, bias=False)
        self.k = nn.Linear(config.hidden, config.key_value_heads * config.head_size, bias=False)
        self.v = nn.Linear(config.hidden, config.key_value_heads * config.head_size, bias=False)
        self.o = nn.Linear(config.query_hidden, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BHSK = self.rotary.rotate(self._heads(self.q(x_BSD)))
        k_BJSK = self.rotary.rotate(self._heads(self.k(x_BSD)))
        v_BJSK = self._heads(self.v(x_BSD))
        out_BHSK = F.scaled_dot_product_attention(
            q_BHSK, k_BJSK, v_BJSK, is_causal=True, enable_gqa=self.grouped
        )
        return self.o(out_BHSK.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, S, H * K] -> [B, H, S, K]


class PlainMlp(nn.Module):
    """SwiGLU, [B, S, D] to [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.down = nn.Linear(config.ffn_hidden, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class PlainBlock(nn.Module):
    """Transformer block with pre-normalization, [B, S, D] to [B, S, D]."""

    def __init__(self, config: ModelConfig, rotary: PlainRotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = PlainAttention(config, rotary)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = PlainMlp(config)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class PlainLlama(nn.Module):
    """Maps tokens [B, S] to logits [B, S, V]. Without `embed` the input, and without `head` the
    output, is hidden states [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rotary = PlainRotary(config.head_size, config.rope_theta)
        self.embed: nn.Embedding | None = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleDict(
            {str(i): PlainBlock(config, rotary) for i in range(config.layers)}
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head: nn.Linear | None = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)  # [B, S] -> [B, S, D]
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is None:
            return x
        return self.head(x)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies full tensors into the parameters by name.

        `weights` may include tensors of other pipeline stages.
        """
        # a tied weight appears only once, as embed.weight
        for name, parameter in self.named_parameters():
            parameter.copy_(weights[name])


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy over all tokens of logits [B, S, V] and labels [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Device and precision (bf16 autocast of float32 weights, or float32) of a peer."""

    device: torch.device = torch.device("cpu")
    is_bf16: bool = False
    is_compiled: bool = False

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context manager for a forward pass."""
        if self.is_bf16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def compile(self, model: PlainLlama) -> None:
        """Compiles each block in place if `is_compiled`."""
        for layer in model.layers.values() if self.is_compiled else ():
            layer.compile()


FLOAT32_CPU = PeerSettings()


class PlainStack:
    """Training in one process. `train_step` takes the global batch. `recipe.parallel` is
    ignored."""

    def __init__(
        self, recipe: Recipe, weights: Mapping[str, Tensor], settings: PeerSettings = FLOAT32_CPU
    ) -> None:
        self.grad_clip = recipe.train.grad_clip
        self.settings = settings
        with settings.device:
            self.model = PlainLlama(recipe.model)
        self.model.load(weights)
        settings.compile(self.model)
        self.optimizers: list[torch.optim.Optimizer] = [
            adamw(self.model.parameters(), recipe.optimizer.resolved)
        ]

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """Runs one step. Returns the mean loss per token and the gradient norm before clipping."""
        self.model.zero_grad()
        device = self.settings.device
        total = torch.zeros((), device=device)
        for inputs, labels in zip(batch.inputs.to(device), batch.labels.to(device), strict=True):
            with self.settings.autocast():
                loss = token_loss(self.model(inputs), labels) / len(batch.inputs)
            loss.backward()
            total += loss.detach()
        # An infinite limit never clips.
        limit = float("inf") if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for optimizer in self.optimizers:
            optimizer.step()
        return total.item(), norm.item()

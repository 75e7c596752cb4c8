"""Positions of tokens: learned embeddings, positions within packed documents, and the scalings that stretch
rotary frequencies to longer contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.layers.init import normal
from parallel3d.layers.parameter import Initializer, ParallelModule, ParameterSpec, replicated
from parallel3d.layers.placement import LayerTp


class LearnedPositions(ParallelModule):
    """x + weight[position] (GPT-2). x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`:
    each tp rank then adds those of its tokens, and the weight's gradient is summed over tp. Else nothing is sent.

    `positions` [batch, seq], of the whole sequence on every rank: 0, 1, ... where it is not given.
    Raises ValueError where the sequence is longer than `longest`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        longest: int,
        hidden: int,
        *,
        tp: LayerTp = None,
        init: Initializer = normal(0.02),
    ) -> None:
        super().__init__(tp)
        self.longest = longest
        self.add_parameter(
            "weight", ParameterSpec((longest, hidden), None, init, partial_gradient=self.sequence_parallel)
        )

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        own = x.shape[1]
        first = self.axis.rank * own if self.sequence_parallel else 0
        length = own * self.axis.size if self.sequence_parallel else own
        if length > self.longest:
            raise ValueError(f"LearnedPositions: a sequence of {length} tokens, and there are {self.longest} positions")
        weight = replicated(self.weight, self, "weight")
        if positions is None:
            return x + weight[first : first + own]
        return x + F.embedding(positions[:, first : first + own], weight)


def positions_in_documents(documents: Tensor) -> Tensor:
    """Returns each token's place in its own document, int64 [batch, seq]. Document ids [batch, seq] are equal and
    adjacent within a document."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return place - (place * starts).cummax(dim=1).values


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: frequencies whose wavelength exceeds original_length / low_factor are divided by `factor`, those
    below original_length / high_factor stay, those between are blended. (Dubey et al. 2024, arXiv 2407.21783, names no
    formula; this is that of Meta's llama-models, models/llama3/model.py, `apply_scaling`.)"""

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = self.original_length * frequencies / (2 * math.pi)  # in the original context
        keep = ((turns - self.low_factor) / (self.high_factor - self.low_factor)).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / self.factor)

    @property
    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3): dims that turn less than `slow` times in the original
    context are interpolated, those that turn more than `fast` times stay, those between are blended linearly by their
    index; queries and keys grow by 0.1 ln(factor) + 1 (`magnitude`, unless `attention_factor` says)."""

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        half = frequencies.numel()

        def index(turns: float) -> float:
            """The pair of dims that turns so many times in the original context."""
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(index(self.fast)), 0)
        high = min(math.ceil(index(self.slow)), 2 * half - 1)
        place = torch.arange(half, dtype=torch.float32, device=frequencies.device)
        interpolate = ((place - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return frequencies * (1.0 - interpolate + interpolate / self.factor)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

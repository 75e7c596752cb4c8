"""Decoders that do what the shipped models do not: each has made some layout train another
model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.parameter import (
    LayerTp,
    ParallelContext,
    ParallelModule,
    ParameterSpec,
    normal,
    ones,
)
from parallel3d.models.llama import Llama

CAP = 0.3


class SoftCap(Llama):
    """Computes something after its head."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(*args, **kwargs)
        if self.head is None:
            return y
        return CAP * torch.tanh(y / CAP)


class Saturated(Llama):
    """Ends with an operation that saves its output for the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(*args, **kwargs)
        return y if self.head is None else torch.tanh(y)


class SequenceFirst(Llama):
    """Returns a transposed view of logits [seq, batch, vocab]."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(*args, **kwargs)
        if self.head is None:
            return y
        return y.transpose(0, 1).contiguous().transpose(0, 1)


class Gain(ParallelModule):
    """A factor for each feature."""

    def __init__(self, hidden: int, tp: LayerTp) -> None:
        super().__init__(tp)
        self.add_parameter("weight", ParameterSpec((hidden,), None, ones))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.replicated("weight")
        return y


class Scaled(nn.Module):
    """A module between two gains."""

    def __init__(self, before: Gain, inner: nn.Module, after: Gain) -> None:
        super().__init__()
        self.before = before
        self.inner = inner
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.inner(self.before(x)))
        return y


class TwoTies(Llama):
    """Ties two vectors of its first block to two of its last one, which has them in the other
    order."""

    def __init__(self, config: Any, *, tp: LayerTp = None, **settings: Any) -> None:
        super().__init__(config, tp=tp, **settings)
        assert self.embed is not None
        assert self.norm is not None
        gains = [Gain(config.hidden, tp) for _ in range(4)]
        self.embed = nn.Sequential(self.embed, gains[0], nn.Tanh(), gains[1])
        self.norm = Scaled(gains[2], self.norm, gains[3])
        gains[2].weight, gains[3].weight = gains[1].weight, gains[0].weight


class SharedNorms(Llama):
    """Shares a norm's weight between its first block and the next one."""

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.layers["1"].mlp_norm.weight = self.layers["0"].mlp_norm.weight


class Frozen(Llama):
    """Does not train some weights."""

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(config, **settings)
        block = self.layers["0"]
        for parameter in (block.mlp.up.weight, block.attention.o.weight):
            parameter.requires_grad_(False)


class Gathered(Llama):
    """Returns all logits on every tp rank."""

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(config, **settings)
        context = self.head.context
        self.head = ColumnParallelLinear(
            config.hidden,
            config.vocab,
            tp=context,
            gather_output=True,
        )


class Unused(Llama):
    """Has a parameter that no forward uses."""

    def __init__(self, config: Any, *, tp: LayerTp = None, **settings: Any) -> None:
        super().__init__(config, tp=tp, **settings)
        context = ParallelContext(tp, device=settings.get("device"))
        self.layers["0"].spare = RowParallelLinear(config.hidden, config.hidden, tp=context)


class TwoStarts(Llama):
    """Declares two initial values of one tied weight."""

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__(replace(config, tied_embeddings=True), **settings)
        self.head.specs["weight"] = replace(self.head.specs["weight"], init=normal(0.5))

"""The MLP of a transformer block, with its hidden features split over tp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from parallel3d.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    flat_tokens,
)
from parallel3d.layers.parameter import LayerTp, ParallelModule, Pointwise

Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]
GATED: tuple[Activation, ...] = ("swiglu", "geglu")
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return activation(gate) * up


class ParallelMLP(ParallelModule):
    """MLP with its hidden features split over tp, with or without a gate.

    With a gate (swiglu, geglu; Shazeer 2020, arXiv 2002.05202): y = (act(x W_gate^T) * x W_up^T)
    W_down^T. Without a gate: y = act(x W_up^T) W_down^T.

    Shapes: x and y [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence parallelism.

    Communication: that of one column-parallel and one row-parallel linear layer.

    Args:
        hidden: Hidden size of the model.
        ffn_hidden: Hidden size of the MLP. tp must divide it.
        activation: "swiglu", "geglu", "gelu", "gelu_tanh" or "relu".
        bias: If True, each linear layer has a bias.
        tp: Tensor-parallel axis or a `ParallelContext`.

    Raises:
        ValueError: The activation is unknown, or tp does not divide `ffn_hidden`.

    Example:
        >>> layer = parallel3d.ParallelMLP(64, 256, activation="gelu")
        >>> layer(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        tp: LayerTp = None,
    ) -> None:
        super().__init__(tp)
        if activation not in ACTIVATIONS:
            tries = ", ".join(ACTIVATIONS)
            raise ValueError(f"ParallelMLP: activation = {activation}: must be one of {tries}")
        self.pointwise: Pointwise = gated
        self.activation = ACTIVATIONS[activation]
        column = partial(ColumnParallelLinear, hidden, ffn_hidden, tp=tp, bias=bias)
        self.gate = column() if activation in GATED else None
        self.up = column()
        self.down = RowParallelLinear(ffn_hidden, hidden, tp=tp, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = flat_tokens(x, self)
        if self.gate is None:
            inner = self.activation(self.up(tokens))
        else:
            gate, up = column_parallel(tokens, (self.gate, self.up))  # [..., ffn_hidden / tp] each
            inner = self.pointwise(gate, up, self.activation)
        y: Tensor = self.down(inner)
        return y.view(x.shape)

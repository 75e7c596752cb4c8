"""The feed-forward half of a block, its inner features split over tp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.parameter import (
    Initializer,
    LayerTp,
    ParallelModule,
    Pointwise,
    normal,
    zeros,
)

Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"]

_gelu_tanh: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


def gated(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns activation(gate) * up."""
    return activation(gate) * up


class ParallelMLP(ParallelModule):
    """With a gate (swiglu, geglu; Shazeer 2020, arXiv 2002.05202): y = (act(x W_gate^T) * x W_up^T)
    W_down^T. Without (gelu, relu): y = act(x W_up^T) W_down^T. `bias` gives each of the matrices
    one.

    x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`. Sends what one
    column- and one row-parallel linear send. Raises ValueError where tp does not divide ffn_hidden.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        tp: LayerTp = None,
        init: Initializer = normal(0.02),
        output_init: Initializer | None = None,
        bias_init: Initializer = zeros,
    ) -> None:
        super().__init__(tp)
        if activation not in GATED and activation not in UNGATED:
            raise ValueError(
                f"ParallelMLP: activation = {activation}: try one of "
                f"{', '.join([*GATED, *UNGATED])}"
            )
        self.pointwise: Pointwise = gated
        self.activation = GATED.get(activation) or UNGATED[activation]

        column = partial(ColumnParallelLinear, tp=tp, init=init, bias=bias, bias_init=bias_init)
        self.gate = column(hidden, ffn_hidden) if activation in GATED else None
        self.up = column(hidden, ffn_hidden)
        init = output_init or init
        self.down = RowParallelLinear(
            ffn_hidden, hidden, tp=tp, init=init, bias=bias, bias_init=bias_init
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = column_parallel(x, (self.gate, self.up))  # [batch, seq, ffn_hidden / tp] each
        return self.down(self.pointwise(gate, up, self.activation))

"""The feed-forward half of a block, its inner features split over tp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.layers.init import normal
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.parameter import Initializer, ParallelModule


class ParallelMLP(ParallelModule):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): y = (silu(x W_gate^T) * x W_up^T) W_down^T.

    x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`. Sends what one column- and one
    row-parallel linear send. Raises ValueError where tp does not divide ffn_hidden.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        tp: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        init: Initializer = normal(0.02),
        output_init: Initializer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp)

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden, ffn_hidden, tp=tp, sequence_parallel=sequence_parallel, init=init, device=device, dtype=dtype
            )

        self.gate = column()
        self.up = column()
        self.down = RowParallelLinear(
            ffn_hidden,
            hidden,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init=output_init or init,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, (self.gate, self.up))  # [batch, seq, ffn_hidden / tp] each
        return self.down(F.silu(gate) * up)

"""In how many bits what is kept and sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """`compute`: parameters and activations in forward and backward. `master`: what the optimizer steps and a
    checkpoint holds, and what gradients are added up in. `reduce`: gradients on their way over the data axes.

    Where compute and master differ, NO_SHARD and SHARD_OPTIMIZER keep a copy of the parameters in each, the others
    only the master's, from which they gather.
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: nn.Module) -> Dtypes:
        """As the model's parameters are. Raises ValueError where they differ."""
        found = {parameter.dtype for parameter in model.parameters()} or {torch.float32}
        if len(found) > 1:
            raise ValueError(f"parameters of {', '.join(sorted(map(str, found)))}: say dtypes=Dtypes(...)")
        (dtype,) = found
        return cls(compute=dtype, master=dtype, reduce=dtype)

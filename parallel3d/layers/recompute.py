"""Activation recompute of a block (Chen et al. 2016, arXiv 1604.06174): its input alone is kept for the backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Compute = Callable[[Tensor, Tensor | None], Tensor]


class Recomputed:
    """The forward of a block that computes its activations a second time in the backward, instead of keeping them.

    `block.forward = Recomputed(block.forward, ...)` puts it in the place of the block's own forward. Hooks of the block
    (`fully_shard`'s, the reduction of gradients) stay outside and run once. `torch.compile` may replace `compute`.
    `draws_dropout`: whether the block has a dropout, whose random state is restored unless the dropout has a key.
    """

    def __init__(self, compute: Compute, *, draws_dropout: bool) -> None:
        self.compute = compute
        self.draws_dropout = draws_dropout

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.compute(x, key)
        draws = self.draws_dropout and key is None
        y: Tensor = checkpoint(self.compute, x, key, use_reentrant=False, preserve_rng_state=draws)
        return y

"""Router of a mixture of experts: chooses the experts of each token and the weights of their
outputs.

Every layout makes the same choices: logits and scores are float32, or float64 for float64 inputs,
and among equal scores the lower expert wins. A recomputed block does not route again
(`layers.recompute`).

Balance without a loss (Wang et al. 2024, arXiv 2408.15664): a bias per expert is added to the
scores for the choice only. After each step, `balance` raises the biases of experts with fewer
tokens than the mean, and lowers the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.experts import ExpertsConfig
from parallel3d.layers.loss import wide_dtype
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec
from parallel3d.layers.recompute import kept
from parallel3d.torch_private import is_in_backward


def choose_experts(scores: Tensor, per_token: int) -> Tensor:
    """Returns the experts [tokens, per_token] with the largest scores [tokens, experts].

    In a recomputed region, returns the choice of the forward pass.
    """

    def choose() -> Tensor:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[:, :per_token].contiguous()

    return kept(choose)


def load_of(chosen: Tensor, experts: int) -> Tensor:
    """Returns how often each of the experts is in `chosen`."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


class Router(ParallelModule):
    """Chooses `per_token` experts for each token.

    Shapes: x [tokens, hidden], with other tokens on each tp rank. The result is the experts
    [tokens, per_token] and their weights [tokens, per_token].

    The weight [experts, hidden] is replicated. Its gradient is summed over tp.

    Args:
        hidden: Hidden size of the model.
        config: Experts of the model.
        tp: Tensor-parallel axis or a `ParallelContext`.
    """

    bias: Tensor | None
    load: Tensor

    def __init__(self, hidden: int, config: ExpertsConfig, *, tp: LayerTp = None) -> None:
        super().__init__(tp)
        self.config = config
        shape = (config.count, hidden)
        is_partial = self.axis.size > 1
        spec = ParameterSpec(shape, None, self.context.init, partial_gradient=is_partial)
        self.add_parameter("weight", spec)
        # On the CPU, because nothing would fill a buffer on the meta device.
        bias = torch.zeros(config.count, device="cpu") if config.bias_rate else None
        self.register_buffer("bias", bias)
        # Tokens of each expert since the last `take_load`, on this rank.
        load = torch.zeros(config.count, dtype=torch.int64, device="cpu")
        self.register_buffer("load", load, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        wide = wide_dtype(x)
        logits = F.linear(x.to(wide), self.replicated("weight").to(wide))
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        ranked = scores.detach()
        if self.bias is not None:
            ranked = ranked + self.bias
        chosen = choose_experts(ranked, config.per_token)
        if self.training and torch.is_grad_enabled() and not is_in_backward():
            self.load += load_of(chosen, config.count)
        weights = scores.gather(-1, chosen)
        if config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights * config.scale

    def take_load(self) -> Tensor:
        """Returns the number of tokens of each expert on this rank, and restarts the count."""
        load = self.load.clone()
        self.load.zero_()
        return load

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None:  # float32 in every precision
            self.bias = bias.to(self.bias.device)
        return self

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        """Moves the biases by `bias_rate`, given the load of each expert over all ranks."""
        if self.bias is not None:
            wanted = (load.sum() - load * len(load)).sign()
            self.bias.add_(wanted.to(self.bias), alpha=self.config.bias_rate)

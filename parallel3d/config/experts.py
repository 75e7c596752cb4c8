"""The section `model.experts` of a recipe: the mixture of experts that replaces the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from parallel3d.config.ranges import in_range

_Count = Annotated[int, in_range(ge=1, le=2**27)]
_Size = Annotated[int, in_range(ge=0, le=2**27)]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a mixture-of-experts (MoE) layer. A router selects `per_token` of them for
    each token. No token is dropped, and no balance loss is added.

    Example:
        >>> experts = parallel3d.ExpertsConfig(count=8, per_token=2, hidden=128)
    """

    count: _Count  # Number of experts in a layer.
    per_token: _Count  # Number of experts that compute each token.
    hidden: _Count  # Hidden size of one expert.
    # Hidden size of the shared expert, which computes all tokens. 0: none.
    shared_hidden: _Size = 0
    shared_gate: bool = False  # Scale the output of the shared expert by a gate, as Qwen 2 does.
    # Number of leading blocks with an MLP of size model.ffn_hidden instead of experts.
    dense_layers: _Size = 0
    # Score of an expert for a token, from the router's logits.
    score: Literal["softmax", "sigmoid"] = "softmax"
    # Divide the scores of a token's experts by their sum.
    normalize: bool = True
    # Factor of the output of the experts, without the shared expert.
    scale: Annotated[float, in_range(gt=0)] = 1.0
    # Change of the bias of each expert per step, which balances the load (arXiv 2408.15664). The
    # bias affects the choice of experts, not their weights. 0: no bias.
    bias_rate: Annotated[float, in_range(ge=0)] = 0.0

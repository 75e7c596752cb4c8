"""Mixture-of-experts layers and multi-head latent attention (DeepSeek), as parts of a model
shape."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.experts import ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class Experts(ExpertsConfig):
    """The experts of a shape, with what only the planner knows."""

    router_bias: bool = False  # True if a bias per expert balances the router (DeepSeek V3)
    # Largest number of groups (nodes) over which the experts of a token may spread. None: no limit.
    most_groups: int | None = None


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    Queries, keys and values come from low-rank vectors. RoPE applies to a part of each query and
    key. All heads share that part of the key.
    """

    # Rank of the queries' low-rank vectors. None: queries are projected from the hidden features
    # directly.
    query_rank: int | None
    key_value_rank: int
    turned: int  # Features per head of queries and keys with RoPE.
    plain: int  # Features per head of queries and keys without RoPE.
    value: int  # Features per head of values.

"""What takes the place of a block's usual halves: experts in the place of the feed-forward part (a
mixture of experts), and attention whose keys and values come from a narrow vector (DeepSeek's).
Frozen numbers, as a shape has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The feed-forward parts of a mixture's layer, of which a router chooses some for each
    token."""

    count: int
    per_token: int
    hidden: int  # features within one
    shared_hidden: int = 0  # features of those together that every token takes
    shared_gate: bool = False  # a number that each token's shared part is multiplied with (Qwen 2)
    router_bias: bool = False  # a number for each expert that balances them (DeepSeek V3)
    # first layers, which have one feed-forward part of `ffn_hidden` and no experts
    dense_layers: int = 0
    # a token's experts are of so many groups at most, one on each node
    most_groups: int | None = None


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): queries, and keys with values,
    by way of vectors of a low rank; a part of each head's queries and keys is turned, and that of
    the keys is one for all heads."""

    query_rank: int | None  # None: queries come from the hidden features at once
    key_value_rank: int
    turned: int  # features of a head's query and key that carry the position
    plain: int  # ... and those that do not
    value: int  # features of a head's value

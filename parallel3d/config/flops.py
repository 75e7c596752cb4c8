"""FLOPs of a training step. The trainer and the planner use the same functions."""

from __future__ import annotations

from collections.abc import Callable


def attended_keys(seq_len: int, window: int | None) -> float:
    """Returns the number of keys per query that `training_flops_per_token` counts.

    Without a window this is `seq_len`: by convention causal attention counts as full attention.
    With a window it is `seq_len` times the fraction of causal query-key pairs inside it."""
    if window is None or window >= seq_len:
        return seq_len
    return window * (2 - window / seq_len)


def training_flops_per_token(
    *,
    layers: int,
    hidden: int,
    query_hidden: int,
    weights_per_block: float,
    vocab: int,
    seq_len: float,
) -> float:
    """Returns the FLOPs per token of the forward and backward passes.

    These are 6 per weight of a matrix, including the head, and 12 * layers * query_hidden *
    seq_len for attention, with `seq_len` from `attended_keys`. Recomputation, norms, biases and
    embedding look-ups are not counted. Causal attention counts as full attention (Narayanan et
    al. 2021, arXiv 2104.04473, appendix; Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
    return (
        6.0 * (layers * weights_per_block + vocab * hidden) + 12.0 * layers * query_hidden * seq_len
    )


# (CUDA device name, precision) -> dense peak FLOP/s, or None if unknown. The float32 peak is that
# without TensorFloat-32, which this project leaves off because it rounds to 10 bits.
PeakOf = Callable[[str, str], float | None]

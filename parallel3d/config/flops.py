"""Floating-point operations of a training step. The trainer and the planner count with the same
functions."""

from __future__ import annotations

from collections.abc import Callable


def block_weights(
    *, hidden: int, query_hidden: int, kv_hidden: int, ffn_hidden: int, ffn_matrices: int
) -> int:
    """Returns the weights of one block's matrices: queries and output, keys and values, and the
    feed-forward part."""
    return hidden * (2 * query_hidden + 2 * kv_hidden + ffn_matrices * ffn_hidden)


def attended_keys(seq_len: int, window: int | None) -> float:
    """Returns how many keys `training_flops_per_token` counts for a query: all of the sequence,
    whose causal half is counted whole; and under a window as much of that as the window leaves of
    the pairs."""
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
    """Returns the operations of a token's forward and backward: 6 for each weight of a matrix, the
    head's included, and 12 L Q S for attention, Q features of all queries. Recomputation, norms,
    biases and look-ups are not counted, and causal attention is counted whole (Narayanan et al.
    2021, arXiv 2104.04473, appendix; Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
    return (
        6.0 * (layers * weights_per_block + vocab * hidden) + 12.0 * layers * query_hidden * seq_len
    )


# From the name that CUDA gives a device and a precision to its dense peak FLOP/s, or None where
# that is not known. That of float32 is without TensorFloat-32, which rounds factors to 10 bits and
# which this project leaves off.
PeakOf = Callable[[str, str], float | None]

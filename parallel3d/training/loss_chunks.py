"""How many tokens' logits exist at a time: a fact that the loss computes with and the planner prices. Without torch."""

from __future__ import annotations

CHUNK_BYTES = 2**29  # float32 logits of a chunk; smaller ones make products too narrow to be quick
LARGE_BYTES = 2 * CHUNK_BYTES  # float32 logits of a microbatch, from which on they are made in chunks


def tokens_at_a_time(wanted: int | None, *, tokens: int, vocab: int, tp: int) -> int | None:
    """Returns the tokens whose logits exist at a time, or None where those of the whole microbatch do. `wanted` is
    `train.loss_chunk_tokens`; where it is None the size of the logits decides. `tokens` are those of one microbatch."""
    token_bytes = 4 * -(-vocab // tp)
    if wanted is None:
        wanted = tokens if tokens * token_bytes < LARGE_BYTES else max(1, CHUNK_BYTES // token_bytes)
    return None if wanted >= tokens else wanted

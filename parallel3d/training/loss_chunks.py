"""How many tokens' logits exist at a time: a fact that the loss computes with and the planner
prices. Without torch."""

from __future__ import annotations

import math

# float32 logits of a chunk; smaller ones make products too narrow to be quick
CPU_CHUNK_BYTES = 2**29
_LARGEST_CHUNK_BYTES = 2**32
_SHARE_OF_GPU = 1 / 32


def chunk_bytes(gpu_bytes: float | None) -> int:
    """Returns the bytes of a chunk's float32 logits, for a GPU of `gpu_bytes` of memory, or None
    for a CPU. A GPU wants wide matmuls, each of which adds to a gradient of the full table: the
    largest power of two in a 32nd of its memory, 2 GiB of 80 GB. It is a power of two because the
    memory of a planned and of a real device may differ by some MiB."""
    if gpu_bytes is None:
        return CPU_CHUNK_BYTES
    power = 2 ** math.floor(math.log2(gpu_bytes * _SHARE_OF_GPU))
    return min(max(power, CPU_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)


def tokens_at_a_time(
    wanted: int | None, *, tokens: int, vocab: int, tp: int, gpu_bytes: float | None
) -> int | None:
    """Returns the tokens whose logits exist at a time, or None where those of the whole microbatch
    do. `wanted` is `train.loss_chunk_tokens`; where it is None, they come in chunks if the logits
    of the microbatch fill two. `tokens` are those of one microbatch, `gpu_bytes` the memory of one
    GPU, None on a CPU."""
    token_bytes = 4 * -(-vocab // tp)
    chunk = chunk_bytes(gpu_bytes)
    if wanted is None:
        wanted = tokens if tokens * token_bytes < 2 * chunk else max(1, chunk // token_bytes)
    return None if wanted >= tokens else wanted

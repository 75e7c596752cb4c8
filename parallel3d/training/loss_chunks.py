"""Computes how many tokens have logits at a time, for the loss and the planner. No torch here."""

from __future__ import annotations

import math

# Size of a chunk of float32 logits. Smaller chunks make matmuls too narrow to be fast.
CPU_CHUNK_BYTES = 2**29
_LARGEST_CHUNK_BYTES = 2**32
_SHARE_OF_GPU = 1 / 32


def chunk_bytes(gpu_bytes: float | None) -> int:
    """Returns the size in bytes of one chunk of float32 logits. `gpu_bytes` is None on CPU.

    On a GPU it is the largest power of two up to 1/32 of the memory, but at least 512 MiB and at
    most 4 GiB: for example, 2 GiB for 80 GB. Chunks must be large there, because the matmul of each
    one reads and writes the gradient of the full weight. A power of two is robust against small
    differences in memory between the planned and the real device.
    """
    if gpu_bytes is None:
        return CPU_CHUNK_BYTES
    power = 2 ** math.floor(math.log2(gpu_bytes * _SHARE_OF_GPU))
    return min(max(power, CPU_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)


def tokens_at_a_time(
    wanted: int | None, *, tokens: int, vocab: int, tp: int, gpu_bytes: float | None
) -> int | None:
    """Returns the number of tokens whose logits exist at a time, or None for the full microbatch.

    Args:
        wanted: `train.loss_chunk_tokens`. None: use chunks if the logits of a microbatch fill at
            least two.
        tokens: Tokens of a microbatch.
        vocab: Size of the vocabulary.
        tp: Tensor-parallel degree.
        gpu_bytes: Memory of a GPU in bytes, None on CPU.
    """
    token_bytes = 4 * -(-vocab // tp)
    chunk = chunk_bytes(gpu_bytes)
    if wanted is None:
        wanted = tokens if tokens * token_bytes < 2 * chunk else max(1, chunk // token_bytes)
    return None if wanted >= tokens else wanted

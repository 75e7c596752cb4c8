"""Floating-point operations of a training step, and the peaks that MFU divides them by. The trainer and the planner
count with the same functions."""

from __future__ import annotations

# Dense peak FLOP/s in bf16 by a part of the name that CUDA gives the device, from the makers' data sheets. The first
# part that a name contains counts. tests/test_metrics.py compares the planner's hardware files with these figures.
PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GB200": 2500e12,
    "B200": 2250e12,
}
# The same in float32, without TensorFloat-32, which rounds factors to 10 bits and which this project leaves off.
PEAK_FP32_FLOPS = {
    "A100": 19.5e12,
    "H100 PCIe": 51e12,
    "H100": 66.9e12,
    "H200": 66.9e12,
    "GB200": 80e12,
    "B200": 75e12,
}


def block_weights(*, hidden: int, kv_hidden: int, ffn_hidden: int, ffn_matrices: int) -> int:
    """Returns the weights of one block's matrices: queries and output, keys and values, and the feed-forward part."""
    return 2 * hidden**2 + 2 * hidden * kv_hidden + ffn_matrices * hidden * ffn_hidden


def training_flops_per_token(*, layers: int, hidden: int, weights_per_block: int, vocab: int, seq_len: int) -> float:
    """Returns the operations of a token's forward and backward: 6 for each weight of a matrix, the head's included, and
    12 L D S for attention. Recomputation, norms, biases and look-ups are not counted, and causal attention is counted
    whole (Narayanan et al. 2021, arXiv 2104.04473, appendix; Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
    return 6.0 * (layers * weights_per_block + vocab * hidden) + 12.0 * layers * hidden * seq_len


def peak_bf16_flops(device_name: str) -> float | None:
    """Returns the dense peak FLOP/s of a device by the name that CUDA gives it; None where it is not known."""
    return next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in device_name), None)


def cost_of_fp32(device_name: str) -> str | None:
    """Returns a line for a run in float32: what its products cost on a device, by the name that CUDA gives it; None
    where its peaks are not known."""
    bf16 = peak_bf16_flops(device_name)
    fp32 = next((flops for part, flops in PEAK_FP32_FLOPS.items() if part in device_name), None)
    if bf16 is None or fp32 is None:
        return None
    slower = f"products at {fp32 / 1e12:g} TFLOP/s at the most, in bf16 at {bf16 / 1e12:g}"
    return f"train.precision = fp32 on {device_name}: {slower}; try train.precision=bf16"

"""Seconds of one kernel on one device: matmuls, attention, and memory-bound kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TypeVar

from parallel3d.planner.hardware.calibration import OneProcess, rate_at
from parallel3d.planner.hardware.cluster import Device

# Rows and columns of the output tile that cuBLAS and CUTLASS prefer (NVIDIA, "Matrix multiplication
# background"). Smaller tiles did not improve any prediction.
_ROWS, _COLUMNS = 256, 128
Measured = TypeVar("Measured")
# Exposed fraction of the idle time in a last, partly filled wave of tiles. Split-k and the next
# kernel's prologue hide the rest.
_TAIL = 0.5
# Inner dimension k of a tile whose loop takes as long as its prologue and epilogue.
_DEPTH = 128
# Relative speed of FP8 matmuls, due to casts, transposes, amax and the power limit.
_FLOAT8 = 0.9
# Achieved fraction of the device's attention rate, which is that of the best kernel on long
# sequences. The second factor also applies to Hopper, whose rate is that of FlashAttention-3
# (arXiv 2407.08608). Both are fitted on the runs of tools/cases.
_ATTENTION, _HOPPER_ATTENTION = 0.7, 0.7
# Slowdown if n or k is not a multiple of 8, so tensor cores cannot use 16-byte loads (NVIDIA, see
# above).
_UNALIGNED = 2.2


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Device and precision that determine kernel times."""

    device: Device
    precision: str
    process: OneProcess | None = None  # Measured curves of a calibrated host. None: assumptions.

    @property
    def half(self) -> str:
        """Precision of operators that FP8 training does not quantize."""
        if self.precision in ("fp16", "fp32"):
            return self.precision
        return "bf16"

    @property
    def memory_rate(self) -> float:
        if self.process is not None:
            return 1.0 / self.process.byte_s
        return self.device.memory_bandwidth * self.device.memory_efficiency


def _measured(by_precision: Mapping[str, Measured], precision: str) -> Measured:
    """Returns the measurement in this precision, or the first one if that is missing."""
    return by_precision.get(precision, next(iter(by_precision.values())))


def matmul_s(kernels: Kernels, m: int, n: int, k: int) -> float:
    """Returns the seconds of the matmul [m, k] x [k, n], measured or from a roofline model."""
    device = kernels.device
    precision = kernels.precision
    if kernels.process is not None:
        rates = _measured(kernels.process.matmul, precision)
        return 2.0 * m * n * k / rate_at(rates, sqrt(m * n), k)
    flops = device.peak(precision) * device.matmul_efficiency
    if precision == "fp8":
        flops *= _FLOAT8
    if n % 8 or k % 8:
        flops /= _UNALIGNED
    waves = ceil(m / _ROWS) * ceil(n / _COLUMNS) / device.processors
    waves += (ceil(waves) - waves) * _TAIL
    compute_s = waves * 2.0 * _ROWS * _COLUMNS * (k + _DEPTH) * device.processors / flops
    item_bytes = {"fp8": 1.0, "fp32": 4.0}.get(precision, 2.0)
    memory_s = item_bytes * (m * k + k * n + m * n) / kernels.memory_rate
    return max(compute_s, memory_s) + device.kernel_s


def flash_attention_s(
    kernels: Kernels,
    *,
    batch_heads: float,
    queries: int,
    keys: float,
    head_dim: int,
    backward: bool,
) -> float:
    """Returns the seconds of causal FlashAttention (Dao 2023, arXiv 2307.08691).

    The causal mask halves the FLOPs. The backward pass has 5 matmuls, the forward pass 2.
    """
    products = (10.0 if backward else 4.0) * batch_heads * queries * keys * head_dim * 0.5
    if kernels.process is not None:
        rates = _measured(kernels.process.attention, kernels.precision)
        rows = rates.backward if backward else rates.forward
        return products / rate_at(rows, keys, head_dim)
    best = kernels.device.attention_tflops
    sustained = 1e12 * (best.backward if backward else best.forward) * _ATTENTION
    if kernels.device.family == "hopper":
        sustained *= _HOPPER_ATTENTION
    # Half of each tile on the diagonal is wasted, and short sequences leave the kernel's pipeline
    # underfilled (Dao 2023, figures 4 to 6). With a head dimension of 64, the softmax takes a
    # larger fraction.
    length = keys / (keys + (420.0 if backward else 300.0))
    depth = min(1.0, 0.62 + 0.38 * head_dim / 128)
    return products / (sustained * length * depth) + kernels.device.kernel_s

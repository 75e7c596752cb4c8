"""Seconds of one kernel on one device: matrix products, attention, and kernels bound by memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TypeVar

from parallel3d.planner.hardware.calibration import OneProcess, rate_at
from parallel3d.planner.hardware.cluster import Device

# Rows and columns of the output tile that cuBLAS and CUTLASS prefer (NVIDIA, "Matrix multiplication
# background"). Smaller tiles made no run's prediction better.
_TILE = (256, 128)
Measured = TypeVar("Measured")
# share of a last, partly filled wave of tiles that split-k and the next kernel's prologue do not
# hide
_TAIL = 0.5
# k of a tile at which its prologue and epilogue take as long as its inner loop would lose
_DEPTH = 128
_FLOAT8 = 0.9  # casts, transposes and amax around each matmul, and the power limit
# Share of the device's figure, which is of the best kernel on long sequences. The second is a
# further share on Hopper, whose figure is of FlashAttention-3 (arXiv 2407.08608). Both are set on
# the runs of tools/cases.
_ATTENTION, _HOPPER_ATTENTION = 0.7, 0.7
# slow-down where a row is no multiple of 8 elements and tensor cores get no 16-byte loads (ibid.)
_UNALIGNED = 2.2


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A device as one framework's kernels use it."""

    device: Device
    precision: str
    process: OneProcess | None = None  # its own curves, where it was calibrated

    @property
    def half(self) -> str:
        """The precision of what float8 leaves alone."""
        if self.precision in ("fp16", "fp32"):
            return self.precision
        return "bf16"

    @property
    def memory_rate(self) -> float:
        if self.process is not None:
            return 1.0 / self.process.byte_s
        return self.device.memory_bandwidth * self.device.memory_efficiency


def _measured(by_precision: Mapping[str, Measured], precision: str) -> Measured:
    """Returns what was measured in this precision, or in the first one that was."""
    return by_precision.get(precision, next(iter(by_precision.values())))


def matmul_s(kernels: Kernels, m: int, n: int, k: int) -> float:
    """Seconds of [m, k] x [k, n]: waves of tiles over the processors, never faster than memory."""
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
    rows, columns = _TILE
    waves = ceil(m / rows) * ceil(n / columns) / device.processors
    waves += (ceil(waves) - waves) * _TAIL
    compute_s = waves * 2.0 * rows * columns * (k + _DEPTH) * device.processors / flops
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
    """Returns a tiled causal kernel's seconds (Dao 2023, arXiv 2307.08691): half the products, 5
    for 2 backward."""
    products = (10.0 if backward else 4.0) * batch_heads * queries * keys * head_dim * 0.5
    if kernels.process is not None:
        rates = _measured(kernels.process.attention, kernels.precision)
        rows = rates.backward if backward else rates.forward
        return products / rate_at(rows, keys, head_dim)
    best = kernels.device.attention_tflops
    sustained = 1e12 * (best.backward if backward else best.forward) * _ATTENTION
    if kernels.device.family == "hopper":
        sustained *= _HOPPER_ATTENTION
    # The diagonal's tiles are half wasted and short rows fill the pipeline badly (ibid., figures 4
    # to 6); heads of 64 spend a larger share on the softmax.
    length = keys / (keys + (420.0 if backward else 300.0))
    depth = min(1.0, 0.62 + 0.38 * head_dim / 128)
    return products / (sustained * length * depth) + kernels.device.kernel_s

"""What `parallel3d-plan calibrate` measures of one process: products, attention and norms by size, through the layers'
own functions. On a GPU the clock is read when the device is done; nothing else differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.layers.attention import attend
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import Placement

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LEAST_SHARE = 0.2  # the least share of a call that is taken for its work and not for its dispatch
_HEADS = 4
_PASSES = 3
_T = TypeVar("_T")

Rows = list[list[float]]


def measure_kernels(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Returns the sections `matmul`, `attention` and `memory` of a process
    (`planner.hardware.calibration.OneProcess`)."""
    gpu = device.type != "cpu"
    sides: Sequence[int] = (512, 2048, 8192) if gpu else (32, 128, 512) if quick else (32, 64, 128, 256, 512, 1024)
    coarse: Sequence[int] = sides if gpu else (128, 512)
    keys: Sequence[int] = (512, 2048, 8192) if gpu else (64, 256) if quick else (64, 256, 1024)
    depths = (64, 128) if gpu else (32, 64) if quick else (32, 64, 128)
    largest = 28 if gpu else 24 if quick else 26
    few_keys = keys if gpu else (256,)
    return {
        "matmul": {p: _matmul(device, p, sides if p == "fp32" else coarse) for p in _DTYPES},
        "attention": {p: _attention(device, p, keys if p == "fp32" else few_keys, depths) for p in _DTYPES},
        "memory": _memory(device, [2**n for n in range(14, largest + 1, 2)]),
    }


def best_s(work: Callable[[], object], device: torch.device, *, round_s: float = 0.005) -> float:
    """Returns the least time of a call, over two rounds of several calls each."""
    work()
    once = max(1e-7, timed_s(work, device, 1))
    calls = max(1, int(round_s / once))
    return min(timed_s(work, device, calls) for _ in range(2))


def _swept(measure: Callable[[int, int], _T], points: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[_T]]:
    """Returns what each pass over all points has measured of each point. What else the machine does for a second spoils
    one pass of a few points, and not every round of one point."""
    found: dict[tuple[int, int], list[_T]] = {point: [] for point in points}
    for _ in range(_PASSES):
        for point, taken in found.items():
            taken.append(measure(*point))
    return found


def timed_s(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Returns the seconds of a call, the mean of `calls` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / calls


def _beyond(seconds: float, dispatch_s: float) -> float:
    return max(seconds - dispatch_s, _LEAST_SHARE * seconds)


@torch.no_grad()
def _matmul(device: torch.device, precision: str, sides: Sequence[int]) -> Rows:
    """Returns rows [side, depth, operations per second] of a linear layer's product."""

    def seconds(side: int, depth: int) -> float:
        x, weight = (torch.randn(side, depth, device=device, dtype=_DTYPES[precision]) for _ in range(2))
        return best_s(lambda: F.linear(x, weight), device)

    taken = _swept(seconds, [(8, 8), *product(sides, sides)])
    dispatch = min(taken.pop((8, 8)))
    return [[s, d, 2.0 * s * s * d / _beyond(min(found), dispatch)] for (s, d), found in taken.items()]


def _attention(device: torch.device, precision: str, keys: Sequence[int], depths: Sequence[int]) -> dict[str, Rows]:
    """Returns rows [keys, head dim, operations per second] of causal attention: half of 4 (forward) and of 10
    (backward) operations for each query, key and number of a head."""

    def seconds(length: int, depth: int) -> tuple[float, float]:
        shape = (1, _HEADS, length, depth)
        q, k, v = (torch.randn(shape, device=device, dtype=_DTYPES[precision], requires_grad=True) for _ in range(3))

        def forward() -> Tensor:
            return attend(q, k, v, None, causal=True, scale=None)

        gradient = torch.randn(shape, device=device, dtype=_DTYPES[precision])
        alone = best_s(forward, device)
        both = best_s(lambda: torch.autograd.grad(forward(), (q, k, v), gradient), device)
        return alone, max(both - alone, _LEAST_SHARE * both)

    taken = _swept(seconds, [(8, 32), *product(keys, depths)])
    least_of = {point: tuple(map(min, zip(*found, strict=True))) for point, found in taken.items()}
    dispatch = least_of.pop((8, 32))
    rows: dict[str, Rows] = {"forward": [], "backward": []}
    for (length, depth), found in least_of.items():
        for way, products, took, least in zip(rows, (4.0, 10.0), found, dispatch, strict=True):
            operations = 0.5 * products * _HEADS * length * length * depth
            rows[way].append([length, depth, operations / _beyond(took, least)])
    return rows


@torch.no_grad()
def _memory(device: torch.device, sizes: Sequence[int]) -> Rows:
    """Returns rows [bytes, seconds] of a norm, which reads and writes."""
    features = 256
    norm = RMSNorm(features, tp=Placement(device=device))
    norm.weight.fill_(1.0)

    def seconds(rows: int, _: int) -> float:
        x = torch.randn(rows, features, device=device)
        return best_s(lambda: norm(x), device)

    taken = _swept(seconds, [(1, 0), *((max(1, size // (8 * features)), size) for size in sizes)])
    dispatch = min(taken.pop((1, 0)))
    return [[float(size), _beyond(min(found), dispatch)] for (_, size), found in taken.items()]

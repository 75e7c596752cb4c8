"""What `parallel3d-plan calibrate` measures of one process: products, attention and norms by size, through the layers'
own functions.

[Note: on a GPU] A GPU runs one kernel while the host dispatches the next, so that a step takes the longer of both and
not their sum: nothing is subtracted from what a kernel takes. Kernels are timed by events, behind work that keeps the
GPU busy while the host dispatches them. Operands are taken in turn from so many copies that none is still in the GPU's
cache, and attention has so many heads that every multiprocessor has some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.layers.fused_attention import attend
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import Placement
from parallel3d.tools.clock import DeviceClock

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LEAST_SHARE = 0.2  # the least share of a call that is taken for its work and not for its dispatch
_HEADS, _GPU_HEADS = 4, 64
_GPU_CACHE_BYTES = 2 * 60e6  # twice the largest second-level cache
_MOST_COPIES = 64
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
    """Returns the least time of a call, over two rounds of several calls each. On a GPU it is the time of the call's
    kernels, without gaps between them."""
    work()
    once = max(1e-7, timed_s(work, device, 1))
    calls, clock = max(1, int(round_s / once)), DeviceClock(device)
    ahead = None if device.type == "cpu" else busy(device)
    return min(clock.seconds(work, calls, ahead=ahead) for _ in range(2))


def busy(device: torch.device) -> Callable[[], object]:
    """Returns a call that gives a GPU some milliseconds of work."""
    x, y = (torch.empty(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))

    @torch.no_grad()
    def work() -> None:
        for _ in range(4):
            torch.mm(x, x, out=y)

    return work


def in_turn(make: Callable[[], tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Yields operands that `make` has made, the same ones again and again on a CPU, and on a GPU so many in turn that
    they do not fit its cache."""
    first = make()
    copies = 1
    if device.type != "cpu":
        copies = min(_MOST_COPIES, 1 + int(_GPU_CACHE_BYTES / sum(tensor.nbytes for tensor in first)))
    return cycle([first, *(make() for _ in range(copies - 1))])


def _swept(measure: Callable[[int, int], _T], points: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[_T]]:
    """Returns what each pass over all points has measured of each point. What else the machine does for a second spoils
    one pass of a few points, and not every round of one point."""
    found: dict[tuple[int, int], list[_T]] = {point: [] for point in points}
    for _ in range(_PASSES):
        for point, taken in found.items():
            taken.append(measure(*point))
    return found


def timed_s(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Returns the seconds of a call, the mean of `calls` of them, its dispatch and its waits included."""
    return DeviceClock(device).seconds(work, calls)


def _beyond(seconds: float, dispatch_s: float, device: torch.device) -> float:
    """Returns what a call takes beside its dispatch: all of it on a GPU, [Note: on a GPU]."""
    return seconds if device.type != "cpu" else max(seconds - dispatch_s, _LEAST_SHARE * seconds)


@torch.no_grad()
def _matmul(device: torch.device, precision: str, sides: Sequence[int]) -> Rows:
    """Returns rows [side, depth, operations per second] of a linear layer's product."""

    def seconds(side: int, depth: int) -> float:
        def make() -> tuple[Tensor, ...]:
            return tuple(torch.randn(side, depth, device=device, dtype=_DTYPES[precision]) for _ in range(2))

        operands = in_turn(make, device)
        return best_s(lambda: F.linear(*next(operands)), device)

    taken = _swept(seconds, [(8, 8), *product(sides, sides)])
    dispatch = min(taken.pop((8, 8)))
    return [[s, d, 2.0 * s * s * d / _beyond(min(found), dispatch, device)] for (s, d), found in taken.items()]


def _attention(device: torch.device, precision: str, keys: Sequence[int], depths: Sequence[int]) -> dict[str, Rows]:
    """Returns rows [keys, head dim, operations per second] of causal attention: half of 4 (forward) and of 10
    (backward) operations for each query, key and number of a head."""

    heads = _HEADS if device.type == "cpu" else _GPU_HEADS

    def seconds(length: int, depth: int) -> tuple[float, float]:
        def make() -> tuple[Tensor, ...]:
            shape = (1, heads, length, depth)
            tensors = (torch.randn(shape, device=device, dtype=_DTYPES[precision]) for _ in range(4))
            return tuple(tensor.requires_grad_(at < 3) for at, tensor in enumerate(tensors))  # the last is a gradient

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, None, causal=True, scale=None)

        def forward_and_backward() -> None:
            *inputs, gradient = next(operands)
            torch.autograd.grad(forward(*inputs), inputs, gradient)

        operands = in_turn(make, device)
        alone = best_s(lambda: forward(*next(operands)[:3]), device)
        both = best_s(forward_and_backward, device)
        return alone, max(both - alone, _LEAST_SHARE * both)

    taken = _swept(seconds, [(8, 32), *product(keys, depths)])
    least_of = {point: tuple(map(min, zip(*found, strict=True))) for point, found in taken.items()}
    dispatch = least_of.pop((8, 32))
    rows: dict[str, Rows] = {"forward": [], "backward": []}
    for (length, depth), found in least_of.items():
        for way, products, took, least in zip(rows, (4.0, 10.0), found, dispatch, strict=True):
            operations = 0.5 * products * heads * length * length * depth
            rows[way].append([length, depth, operations / _beyond(took, least, device)])
    return rows


@torch.no_grad()
def _memory(device: torch.device, sizes: Sequence[int]) -> Rows:
    """Returns rows [bytes, seconds] of a norm, which reads and writes."""
    features = 256
    norm = RMSNorm(features, tp=Placement(device=device))
    norm.weight.fill_(1.0)

    def seconds(rows: int, _: int) -> float:
        operands = in_turn(lambda: (torch.randn(rows, features, device=device),), device)
        return best_s(lambda: norm(*next(operands)), device)

    taken = _swept(seconds, [(1, 0), *((max(1, size // (8 * features)), size) for size in sizes)])
    dispatch = min(taken.pop((1, 0)))
    return [[float(size), _beyond(min(found), dispatch, device)] for (_, size), found in taken.items()]

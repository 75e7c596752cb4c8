"""Kernel timings of `parallel3d-plan calibrate` in one process: matmuls, attention and a norm, with
the functions that the layers use.

[Note: on a GPU] A GPU runs one kernel while the host dispatches the next, so a step takes the
longer of both, not the sum. Dispatch time is therefore not subtracted. Kernels are timed by CUDA
events, queued behind work that keeps the GPU busy during dispatch. Operands rotate among enough
copies to miss the cache of the GPU, and attention has enough heads for every multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.layers.fused_attention import attend
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import ParallelContext
from parallel3d.tools.clock import DeviceClock

_LEAST_SHARE = 0.2  # Minimum fraction of a call's time that counts as work, not as dispatch.
_HEADS = {"cpu": 4, "cuda": 64}
_GPU_CACHE_BYTES = 2 * 60e6  # Twice the largest L2 cache of a GPU.
_MOST_COPIES = 64
_PASSES = 3
_FEATURES = 256
_MEMORY_ROWS = 2**15

Rows = list[list[float]]
Point = tuple[int, int]
Work = Callable[[], object]


class _Sizes(NamedTuple):
    """Sizes to measure: sides of matrices, sequence lengths of attention, and head dimensions."""

    sides: tuple[int, ...]
    keys: tuple[int, ...]
    depths: tuple[int, ...]


_ON_GPU = _Sizes((512, 2048, 8192), (512, 2048, 8192), (64, 128))
_ON_CPU = _Sizes((32, 64, 128, 256, 512, 1024), (64, 256, 1024), (32, 64, 128))
_QUICK = _Sizes((32, 128, 512), (64, 256), (32, 64))


def measure_kernels(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Returns the fields `matmul`, `attention` and `memory` of
    `planner.hardware.calibration.OneProcess`.
    """
    wide = narrow = _ON_GPU
    if device.type == "cpu":
        narrow = _QUICK  # CPUs are slow in bf16, so fewer sizes are measured.
        wide = _QUICK if quick else _ON_CPU
    return {
        "matmul": {
            "fp32": _matmul(device, torch.float32, wide),
            "bf16": _matmul(device, torch.bfloat16, narrow),
        },
        "attention": {
            "fp32": _attention(device, torch.float32, wide),
            "bf16": _attention(device, torch.bfloat16, narrow),
        },
        "memory": _memory(device),
    }


def best_s(work: Work, device: torch.device, *, round_s: float = 0.005) -> float:
    """Returns the seconds per call of `work`: the smaller of the means of two rounds. On a GPU it
    is the time of the kernels without gaps.
    """
    work()
    clock = DeviceClock(device)
    call_s = max(1e-7, clock.seconds(work))
    calls = max(1, int(round_s / call_s))
    ahead = None if device.type == "cpu" else _busy(device)
    first_s = clock.seconds(work, calls, ahead=ahead)
    second_s = clock.seconds(work, calls, ahead=ahead)
    return min(first_s, second_s)


def _busy(device: torch.device) -> Work:
    """Returns a function that keeps a GPU busy for a few milliseconds."""
    x = torch.empty(8192, 8192, device=device, dtype=torch.bfloat16)
    return lambda: [torch.mm(x, x) for _ in range(4)]


def _in_turn(make: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function that returns operands made by `make`. On a CPU they are always the same.
    On a GPU they rotate among enough copies (at most 64) to exceed the cache.
    """
    first = make()
    copies = [first]
    if first[0].is_cuda:
        nbytes = sum(tensor.nbytes for tensor in first)
        enough = 1 + int(_GPU_CACHE_BYTES / nbytes)
        while len(copies) < min(_MOST_COPIES, enough):
            copies.append(make())
    return cycle(copies).__next__


def _swept(
    device: torch.device,
    points: Sequence[Point],
    works: Callable[[int, int], Sequence[Work]],
) -> dict[Point, list[float]]:
    """Returns the shortest time in seconds of each work at each point except the first.

    The first point is tiny, so its time is dispatch. On a CPU it is subtracted from the others, but
    not on a GPU (see [Note: on a GPU]). All points are measured in each pass, so a short
    disturbance affects only one pass of a few points.
    """
    found: dict[Point, list[float]] = {}
    for _ in range(_PASSES):
        for point in points:
            taken = [best_s(work, device) for work in works(*point)]
            before = found.get(point, taken)
            found[point] = list(map(min, taken, before))
    dispatch = found.pop(points[0])
    if device.type == "cpu":
        for taken in found.values():
            for work, dispatch_s in enumerate(dispatch):
                least_s = _LEAST_SHARE * taken[work]
                taken[work] = max(least_s, taken[work] - dispatch_s)
    return found


@torch.no_grad()
def _matmul(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> Rows:
    """Returns rows [side, depth, FLOP/s] of linear layers with input and weight [side, depth]."""

    def works(side: int, depth: int) -> list[Work]:
        def make() -> tuple[Tensor, Tensor]:
            x = torch.randn(side, depth, device=device, dtype=dtype)
            return x, x.clone()

        operands = _in_turn(make)
        return [lambda: F.linear(*operands())]

    points = [(8, 8), *product(sizes.sides, sizes.sides)]
    rows: Rows = []
    for (side, depth), (seconds,) in _swept(device, points, works).items():
        operations = 2.0 * side * side * depth
        rows.append([side, depth, operations / seconds])
    return rows


def _attention(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> dict[str, Rows]:
    """Returns rows [keys, head dim, FLOP/s] of causal attention. Per query, key and head feature,
    the forward pass has 4 operations and the backward pass 10. The causal mask halves both.
    """
    heads = _HEADS[device.type]

    def works(length: int, depth: int) -> list[Work]:
        def make() -> tuple[Tensor, ...]:
            x = torch.randn(1, heads, length, depth, device=device, dtype=dtype)
            q = x.clone().requires_grad_()
            k = x.clone().requires_grad_()
            v = x.clone().requires_grad_()
            return q, k, v, x  # x also serves as the gradient of the output.

        operands = _in_turn(make)

        def forward() -> None:
            q, k, v, _ = operands()
            attend(q, k, v, None, causal=True)

        def forward_and_backward() -> None:
            q, k, v, gradient = operands()
            output = attend(q, k, v, None, causal=True)
            torch.autograd.grad(output, (q, k, v), gradient)

        return [forward, forward_and_backward]

    points = [(8, 32), *product(sizes.keys, sizes.depths)]
    forward_rows: Rows = []
    backward_rows: Rows = []
    for (length, depth), (forward_s, both_s) in _swept(device, points, works).items():
        operations = 0.5 * heads * length * length * depth
        backward_s = max(both_s - forward_s, _LEAST_SHARE * both_s)
        forward_rows.append([length, depth, 4.0 * operations / forward_s])
        backward_rows.append([length, depth, 10.0 * operations / backward_s])
    return {"forward": forward_rows, "backward": backward_rows}


@torch.no_grad()
def _memory(device: torch.device) -> Rows:
    """Returns a row [bytes moved, seconds] of a large RMSNorm, whose speed is bound by memory."""
    norm = RMSNorm(_FEATURES, tp=ParallelContext(device=device))
    norm.weight.fill_(1.0)

    def make() -> tuple[Tensor]:
        return (torch.randn(_MEMORY_ROWS, _FEATURES, device=device),)

    operands = _in_turn(make)
    seconds = best_s(lambda: norm(*operands()), device)
    float32_bytes = 4
    moved = 2.0 * float32_bytes * _MEMORY_ROWS * _FEATURES
    return [[moved, seconds]]

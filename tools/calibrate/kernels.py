"""What `parallel3d-plan calibrate` measures of one process: products, attention and norms by size,
through the layers' own functions.

[Note: on a GPU] A GPU runs one kernel while the host dispatches the next, so that a step takes the
longer of both and not their sum: nothing is subtracted from what a kernel takes. Kernels are timed
by events, behind work that keeps the GPU busy while the host dispatches them. Operands are taken in
turn from so many copies that none is still in the GPU's cache, and attention has so many heads that
every multiprocessor has some.
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

_LEAST_SHARE = 0.2  # the least share of a call that is taken for its work and not for its dispatch
_HEADS = {"cpu": 4, "cuda": 64}
_GPU_CACHE_BYTES = 2 * 60e6  # twice the largest second-level cache
_MOST_COPIES = 64
_PASSES = 3
_FEATURES, _MEMORY_ROWS = 256, 2**15

Rows = list[list[float]]
Point = tuple[int, int]
Work = Callable[[], object]


class _Sizes(NamedTuple):
    """What is measured: sides of products, keys of attention, and depths of heads."""

    sides: tuple[int, ...]
    keys: tuple[int, ...]
    depths: tuple[int, ...]


_ON_GPU = _Sizes((512, 2048, 8192), (512, 2048, 8192), (64, 128))
_ON_CPU = _Sizes((32, 64, 128, 256, 512, 1024), (64, 256, 1024), (32, 64, 128))
_QUICK = _Sizes((32, 128, 512), (64, 256), (32, 64))


def measure_kernels(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Returns the sections `matmul`, `attention` and `memory` of a process
    (`planner.hardware.calibration.OneProcess`)."""
    sizes = _ON_GPU
    if device.type == "cpu":
        sizes = _QUICK if quick else _ON_CPU
    found: dict[str, Any] = {"matmul": {}, "attention": {}, "memory": _memory(device)}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if dtype == torch.bfloat16 and device.type == "cpu":
            sizes = _QUICK  # a CPU is slow in bf16
        found["matmul"][precision] = _matmul(device, dtype, sizes)
        found["attention"][precision] = _attention(device, dtype, sizes)
    return found


def best_s(work: Work, device: torch.device, *, round_s: float = 0.005) -> float:
    """Returns the least time of a call, over two rounds of several calls each. On a GPU it is the
    time of the call's kernels, without gaps between them."""
    work()
    clock = DeviceClock(device)
    calls = max(1, int(round_s / max(1e-7, clock.seconds(work))))
    ahead = None if device.type == "cpu" else _busy(device)
    return min(clock.seconds(work, calls, ahead=ahead) for _ in range(2))


def _busy(device: torch.device) -> Work:
    """Returns a call that gives a GPU some milliseconds of work."""
    x = torch.empty(8192, 8192, device=device, dtype=torch.bfloat16)
    return lambda: [torch.mm(x, x) for _ in range(4)]


def _in_turn(make: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a call that gives operands which `make` has made, the same ones again and again on a
    CPU, and on a GPU so many in turn that they do not fit its cache."""
    copies = [make()]
    if copies[0][0].is_cuda:
        enough = 1 + int(_GPU_CACHE_BYTES / sum(tensor.nbytes for tensor in copies[0]))
        copies += [make() for _ in range(min(_MOST_COPIES, enough) - 1)]
    return cycle(copies).__next__


def _swept(
    device: torch.device,
    points: Sequence[Point],
    works: Callable[[int, int], Sequence[Work]],
) -> dict[Point, list[float]]:
    """Returns the least seconds of the works of each point. On a CPU they are without those of the
    first point, which is so small that its time is dispatch (on a GPU: [Note: on a GPU]). What else
    the machine does for a second spoils one pass of a few points, and not every round of one."""
    found: dict[Point, list[float]] = {}
    for _ in range(_PASSES):
        for point in points:
            taken = [best_s(work, device) for work in works(*point)]
            found[point] = [*map(min, taken, found.get(point, taken))]
    dispatch = found.pop(points[0])
    if device.type == "cpu":
        for point, taken in found.items():
            pairs = zip(taken, dispatch, strict=True)
            found[point] = [max(each - less, _LEAST_SHARE * each) for each, less in pairs]
    return found


@torch.no_grad()
def _matmul(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> Rows:
    """Returns rows [side, depth, operations per second] of a linear layer's product."""

    def works(side: int, depth: int) -> list[Work]:
        def make() -> tuple[Tensor, Tensor]:
            x = torch.randn(side, depth, device=device, dtype=dtype)
            return x, x.clone()

        operands = _in_turn(make)
        return [lambda: F.linear(*operands())]

    taken = _swept(device, [(8, 8), *product(sizes.sides, sizes.sides)], works)
    return [[side, depth, 2.0 * side * side * depth / s] for (side, depth), (s,) in taken.items()]


def _attention(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> dict[str, Rows]:
    """Returns rows [keys, head dim, operations per second] of causal attention: half of 4 (forward)
    and of 10 (backward) operations for each query, key and number of a head."""
    heads = _HEADS[device.type]

    def works(length: int, depth: int) -> list[Work]:
        def make() -> tuple[Tensor, ...]:
            x = torch.randn(1, heads, length, depth, device=device, dtype=dtype)
            inputs = [x.clone().requires_grad_() for _ in range(3)]
            return *inputs, x  # the last is a gradient

        operands = _in_turn(make)

        def forward() -> tuple[tuple[Tensor, ...], Tensor]:
            q, k, v, _ = given = operands()
            return given, attend(q, k, v, None, causal=True)

        def forward_and_backward() -> None:
            (*inputs, gradient), output = forward()
            torch.autograd.grad(output, inputs, gradient)

        return [forward, forward_and_backward]

    rows: dict[str, Rows] = {"forward": [], "backward": []}
    taken = _swept(device, [(8, 32), *product(sizes.keys, sizes.depths)], works)
    for (length, depth), (forward_s, both_s) in taken.items():
        operations = 0.5 * heads * length * length * depth
        backward_s = max(both_s - forward_s, _LEAST_SHARE * both_s)
        rows["forward"].append([length, depth, 4.0 * operations / forward_s])
        rows["backward"].append([length, depth, 10.0 * operations / backward_s])
    return rows


@torch.no_grad()
def _memory(device: torch.device) -> Rows:
    """Returns [bytes, seconds] of a large norm, which reads and writes."""
    norm = RMSNorm(_FEATURES, tp=ParallelContext(device=device))
    norm.weight.fill_(1.0)
    operands = _in_turn(lambda: (torch.randn(_MEMORY_ROWS, _FEATURES, device=device),))
    seconds = best_s(lambda: norm(*operands()), device)
    return [[2.0 * 4 * _MEMORY_ROWS * _FEATURES, seconds]]

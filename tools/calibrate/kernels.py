"""What `parallel3d-plan calibrate` measures of one process: products, attention and norms by size,
through the layers' own functions.

[Note: on a GPU] A GPU runs one kernel while the host dispatches the next, so that a step takes the
longer of both and not their sum: nothing is subtracted from what a kernel takes. Kernels are timed
by events, behind work that keeps the GPU busy while the host dispatches them. Operands are taken in
turn from so many copies that none is still in the GPU's cache, and attention has so many heads that
every multiprocessor has some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
_HEADS = 4
_GPU_HEADS = 64
_GPU_CACHE_BYTES = 2 * 60e6  # twice the largest second-level cache
_MOST_COPIES = 64
_PASSES = 3
_FEATURES = 256

Rows = list[list[float]]
Point = tuple[int, int]


class _Sizes(NamedTuple):
    """What is measured: sides of products, keys of attention, depths of heads, and the largest
    norm, as a power of two of bytes."""

    sides: tuple[int, ...]
    keys: tuple[int, ...]
    depths: tuple[int, ...]
    largest: int


_ON_GPU = _Sizes((512, 2048, 8192), (512, 2048, 8192), (64, 128), 28)
_ON_CPU = _Sizes((32, 64, 128, 256, 512, 1024), (64, 256, 1024), (32, 64, 128), 26)
_QUICK = _Sizes((32, 128, 512), (64, 256), (32, 64), 24)
_IN_BF16 = _Sizes((128, 512), (256,), (32, 64, 128), 0)  # on a CPU, which is slow in it


def measure_kernels(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Returns the sections `matmul`, `attention` and `memory` of a process
    (`planner.hardware.calibration.OneProcess`)."""
    wide = narrow = _ON_GPU
    if device.type == "cpu":
        wide, narrow = (_QUICK if quick else _ON_CPU), _IN_BF16
    found: dict[str, Any] = {"matmul": {}, "attention": {}}
    for precision, dtype, sizes in (
        ("fp32", torch.float32, wide),
        ("bf16", torch.bfloat16, narrow),
    ):
        found["matmul"][precision] = _matmul(device, dtype, sizes.sides)
        found["attention"][precision] = _attention(device, dtype, sizes.keys, sizes.depths)
    found["memory"] = _memory(device, [2**n for n in range(14, wide.largest + 1, 2)])
    return found


def best_s(work: Callable[[], object], device: torch.device, *, round_s: float = 0.005) -> float:
    """Returns the least time of a call, over two rounds of several calls each. On a GPU it is the
    time of the call's kernels, without gaps between them."""
    work()
    once = max(1e-7, timed_s(work, device, 1))
    calls = max(1, int(round_s / once))
    clock = DeviceClock(device)
    ahead = None if device.type == "cpu" else busy(device)
    return min(clock.seconds(work, calls, ahead=ahead) for _ in range(2))


def busy(device: torch.device) -> Callable[[], object]:
    """Returns a call that gives a GPU some milliseconds of work."""
    x = torch.empty(8192, 8192, device=device, dtype=torch.bfloat16)

    @torch.no_grad()
    def work() -> None:
        for _ in range(4):
            torch.mm(x, x)

    return work


def in_turn(
    make: Callable[[], tuple[Tensor, ...]], device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    """Yields operands that `make` has made, the same ones again and again on a CPU, and on a GPU so
    many in turn that they do not fit its cache."""
    copies = [make()]
    if device.type != "cpu":
        enough = 1 + int(_GPU_CACHE_BYTES / sum(tensor.nbytes for tensor in copies[0]))
        copies += [make() for _ in range(min(_MOST_COPIES, enough) - 1)]
    return cycle(copies)


def _swept(
    measure: Callable[[int, int], tuple[float, ...]], points: Iterable[Point]
) -> dict[Point, tuple[float, ...]]:
    """Returns the least of what several passes over all points have measured of each point. What
    else the machine does for a second spoils one pass of a few points, and not every round of one
    point."""
    found: dict[Point, tuple[float, ...]] = {}
    for _ in range(_PASSES):
        for point in points:
            taken = measure(*point)
            found[point] = tuple(map(min, taken, found.get(point, taken)))
    return found


def timed_s(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Returns the seconds of a call, the mean of `calls` of them, its dispatch and its waits
    included."""
    return DeviceClock(device).seconds(work, calls)


def _beyond(seconds: float, dispatch_s: float, device: torch.device) -> float:
    """Returns what a call takes beside its dispatch: all of it on a GPU, [Note: on a GPU]."""
    return seconds if device.type != "cpu" else max(seconds - dispatch_s, _LEAST_SHARE * seconds)


@torch.no_grad()
def _matmul(device: torch.device, dtype: torch.dtype, sides: Sequence[int]) -> Rows:
    """Returns rows [side, depth, operations per second] of a linear layer's product."""

    def seconds(side: int, depth: int) -> tuple[float]:
        def make() -> tuple[Tensor, Tensor]:
            x = torch.randn(side, depth, device=device, dtype=dtype)
            return x, x.clone()

        operands = in_turn(make, device)
        return (best_s(lambda: F.linear(*next(operands)), device),)

    points = [(8, 8), *product(sides, sides)]
    taken = _swept(seconds, points)
    (dispatch,) = taken.pop((8, 8))
    rows = []
    for (side, depth), (found,) in taken.items():
        rows.append([side, depth, 2.0 * side * side * depth / _beyond(found, dispatch, device)])
    return rows


def _attention(
    device: torch.device, dtype: torch.dtype, keys: Sequence[int], depths: Sequence[int]
) -> dict[str, Rows]:
    """Returns rows [keys, head dim, operations per second] of causal attention: half of 4 (forward)
    and of 10 (backward) operations for each query, key and number of a head."""
    heads = _HEADS if device.type == "cpu" else _GPU_HEADS

    def seconds(length: int, depth: int) -> tuple[float, float]:
        def make() -> tuple[Tensor, ...]:
            x = torch.randn(1, heads, length, depth, device=device, dtype=dtype)
            inputs = [x.clone().requires_grad_() for _ in range(3)]
            return *inputs, x  # the last is a gradient

        def forward() -> Tensor:
            q, k, v, _ = next(operands)
            return attend(q, k, v, None, causal=True, scale=None)

        def forward_and_backward() -> None:
            q, k, v, gradient = next(operands)
            output = attend(q, k, v, None, causal=True, scale=None)
            torch.autograd.grad(output, (q, k, v), gradient)

        operands = in_turn(make, device)
        alone = best_s(forward, device)
        both = best_s(forward_and_backward, device)
        return alone, max(both - alone, _LEAST_SHARE * both)

    taken = _swept(seconds, [(8, 32), *product(keys, depths)])
    least = taken.pop((8, 32))
    rows: dict[str, Rows] = {"forward": [], "backward": []}
    for (length, depth), found in taken.items():
        for at, (way, products) in enumerate((("forward", 4.0), ("backward", 10.0))):
            operations = 0.5 * products * heads * length * length * depth
            seconds_ = _beyond(found[at], least[at], device)
            rows[way].append([length, depth, operations / seconds_])
    return rows


@torch.no_grad()
def _memory(device: torch.device, sizes: Sequence[int]) -> Rows:
    """Returns rows [bytes, seconds] of a norm, which reads and writes."""
    norm = RMSNorm(_FEATURES, tp=ParallelContext(device=device))
    norm.weight.fill_(1.0)

    def seconds(rows: int, _: int) -> tuple[float]:
        operands = in_turn(lambda: (torch.randn(rows, _FEATURES, device=device),), device)
        return (best_s(lambda: norm(*next(operands)), device),)

    points = [(max(1, size // (8 * _FEATURES)), size) for size in sizes]
    taken = _swept(seconds, [(1, 0), *points])
    (dispatch,) = taken.pop((1, 0))
    return [[size, _beyond(found, dispatch, device)] for (_, size), (found,) in taken.items()]

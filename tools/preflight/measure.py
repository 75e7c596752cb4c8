"""Measurements that all ranks make together: matmuls, and every axis of the mesh.

All groups of an axis are measured at the same time, because they also communicate at the same time
in a step, and ranks share a network port."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist

from parallel3d.config.recipe import Precision
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}  # All other precisions use bfloat16.
_MATRIX_SIDES = {"cpu": 512, "cuda": 8192}
_MATMULS = 10  # Number of matmuls per timing.
_MATMULS_S = 1.5  # Minimum duration of a measurement.
_MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
_CALLS = 5


@dataclass(frozen=True, kw_only=True)
class TimedLink:
    """Bandwidth in bytes per second that a rank measured on an axis: of all-reduces in its group,
    or of messages to a neighbor."""

    axis: str
    kind: Literal["all-reduce", "message"]
    ranks: tuple[int, ...]  # Members of the group, or the sender and the receiver.
    bandwidth: float


@torch.no_grad()
def measure_matmuls(device: torch.device, precision: Precision) -> float:
    """Returns the FLOP/s of large matmuls while all other ranks do the same."""
    side = _MATRIX_SIDES[device.type]
    dtype = _DTYPES.get(precision, torch.bfloat16)
    a = torch.randn(side, side, device=device, dtype=dtype)
    _timed(lambda: a @ a, device)
    dist.barrier()
    count = 0
    seconds = 0.0
    while seconds < _MATMULS_S:
        seconds += _timed(lambda: [a @ a for _ in range(_MATMULS)], device)
        count += _MATMULS
    return 2 * side**3 * count / seconds


def measure_axis(name: str, axis: Axis, device: torch.device) -> list[TimedLink]:
    """Measures this rank's group of an axis while all other groups do the same. Every rank must
    call it.

    The bandwidth of an all-reduce is its bus bandwidth, which counts 2 (n - 1) / n times its bytes
    (nccl-tests, doc/PERFORMANCE.md).
    """
    ranks = tuple(dist.get_process_group_ranks(axis.group))
    x = torch.zeros(_MESSAGE_BYTES[device.type] // 4, device=device)
    answer = torch.zeros(1, device=device)
    seconds = _median_s(lambda: all_reduce(x, axis), device)
    moved = 2 * (axis.size - 1) / axis.size * x.nbytes
    found = [TimedLink(axis=name, kind="all-reduce", ranks=ranks, bandwidth=moved / seconds)]
    # Pairs of neighbors exchange messages in both directions: first the pairs whose lower rank is
    # even, then the others.
    for parity, up in product(range(min(2, axis.size - 1)), (True, False)):
        lower = axis.rank - (axis.rank + parity) % 2
        upper = lower + 1
        sender, receiver = (lower, upper) if up else (upper, lower)

        def send(receiver: int = receiver) -> None:
            dist.send(x, group=axis.group, group_dst=receiver)
            dist.recv(answer, group=axis.group, group_src=receiver)

        def receive(sender: int = sender) -> None:
            dist.recv(x, group=axis.group, group_src=sender)
            dist.send(answer, group=axis.group, group_dst=sender)

        if lower < 0 or upper >= axis.size:
            _median_s(lambda: None, device)
        elif axis.rank == sender:
            pair = (ranks[sender], ranks[receiver])
            rate = x.nbytes / _median_s(send, device)
            found.append(TimedLink(axis=name, kind="message", ranks=pair, bandwidth=rate))
        else:
            _median_s(receive, device)
    return found


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    call()  # The first call opens connections and is not timed.
    dist.barrier()
    return median(_timed(call, device) for _ in range(_CALLS))


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

"""Measurements of `parallel3d-plan calibrate` between ranks: collectives of layers, messages
between pipeline stages, and the slowdown of ranks that run at the same time.

They use the functions of training. Small messages within a host use shared memory, others gloo or
NCCL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers.collectives import all_reduce, gather, reduce_scatter
from parallel3d.mesh import Axis, Role, build_mesh
from parallel3d.models.llama import Llama
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from parallel3d.tools.calibrate.kernels import Rows, best_s
from parallel3d.tools.calibrate.probes import LargerRuns
from parallel3d.tools.clock import DeviceClock

_FEATURES = 256
_ROW_BYTES = 4 * _FEATURES
_ROUNDS = 5


def measure_collectives(
    world_size: int, device: torch.device, sizes: Sequence[int]
) -> dict[str, Rows]:
    """Returns rows [bytes of the full tensor, seconds], keyed by the kind of collective."""
    mesh = build_mesh(ParallelConfig(tp=world_size), device.type)
    axis = Axis.of(mesh[Role.SPLIT_TENSORS])
    found: defaultdict[str, Rows] = defaultdict(list)

    def all_reduce_copy(x: Tensor) -> Tensor:
        return all_reduce(x.clone(), axis)

    for size in sizes:
        part_rows = max(1, size // (_ROW_BYTES * world_size))
        part = torch.randn(1, part_rows, _FEATURES, device=device)
        x = torch.randn(1, part_rows * world_size, _FEATURES, device=device)
        works: dict[str, Callable[[], Tensor]] = {
            "all_reduce": partial(all_reduce_copy, x),
            "all_gather": partial(gather, part, axis, 1),
            "reduce_scatter": partial(reduce_scatter, x, axis, 1),
        }
        for kind, work in works.items():
            seconds = together_s(work, device)
            found[kind].append([float(x.nbytes), seconds])
    return dict(found)


def together_s(work: Callable[[], object], device: torch.device, *, round_s: float = 0.01) -> float:
    """Returns the seconds per call if all ranks call `work` at once: those of the slowest rank in
    the fastest round.
    """
    clock = DeviceClock(device)
    work()
    call_s = _largest(clock.seconds(work, 2), device)
    calls = max(1, int(round_s / call_s))
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        own_s = clock.seconds(work, calls)
        rounds.append(_largest(own_s, device))
    return min(rounds)


def _largest(number: float, device: torch.device) -> float:
    value = torch.tensor(number, device=device, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


class _Passing(nn.Module):
    """A stage that returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return x.view_as(x)
        return x.clone().requires_grad_()


def measure_transfers(world_size: int, device: torch.device, sizes: Sequence[int]) -> Rows:
    """Returns rows [bytes, seconds] of a pipeline action that only forwards its input."""
    mesh = build_mesh(ParallelConfig(pp=world_size), device.type)
    pp = mesh[Role.SPLIT_LAYERS]

    def loss(y: Tensor, _: Tensor) -> Tensor:
        return y.flatten()[0]

    def step_s(size: int, microbatches: int) -> float:
        schedule = build_schedule("1f1b", pp=world_size, microbatches=microbatches)
        shape = (size // _ROW_BYTES, _FEATURES)
        spec = TensorSpec(shape, torch.float32)
        runtime = PipelineRuntime([_Passing()], schedule, pp, loss, boundaries=spec, device=device)
        inputs = torch.zeros(microbatches, *shape, device=device)
        return together_s(lambda: runtime.run(inputs), device)

    rows = []
    for size in sizes:
        few_s = step_s(size, 2 * world_size)
        many_s = step_s(size, 6 * world_size)
        microbatch_s = (many_s - few_s) / (4 * world_size)
        action_s = max(1e-7, microbatch_s / 2)
        rows.append([float(size), action_s])
    return rows


def measure_contention(device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a forward and backward pass of a one-layer model: on one rank while
    the others wait, and on all ranks at once. Both are those of the slowest rank.
    """
    larger = LargerRuns.on(device.type)
    model = Llama(larger.model, device=device)
    seq, _ = larger.sizes[1]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    ids = torch.zeros(1, seq, dtype=torch.int64, device=device)

    def work() -> None:
        model(ids).sum().backward()

    alone = 0.0
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            alone = best_s(work, device, round_s=0.05)
    dist.barrier()
    by_one_s = _largest(alone, device)
    return by_one_s, together_s(work, device, round_s=0.1)

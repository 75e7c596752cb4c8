"""`bench pipeline`: the runtime against torch.distributed.pipelining, same stages and schedule, in turn in the same
processes, with nothing else around them: no trainer, no data dimension, no optimizer.

Losses and gradients must agree before anything is timed. Two sizes: `overhead`, whose stages have next to nothing to
compute, and `compute`, where matrix products rule. Then the measured bubble beside the simulated one (`bench_bubble`),
and the memory of 200 steps, which must not grow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from parallel3d.errors import RankError
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName
from parallel3d.schedules.schedule import Schedule
from parallel3d.tools.bench import bubble as bench_bubble
from parallel3d.tools.bench.ranks import run_ranks
from parallel3d.tools.bench.report import Options, ResultRow, Round, announced, chosen, rows_against_peer
from parallel3d.tools.bench.timing import time_in_turn

Step = Callable[[], float]

_AGREEMENT = 1e-4  # relative, of the losses and of each gradient's norm
_MEMORY_STEPS = 200
_MEMORY_BAR = 1.01  # resident memory after the steps, over that before them
_PAGE_MIB = 4096 / 2**20


@dataclass(frozen=True, kw_only=True)
class StageSize:
    """What a stage computes, the number of microbatches, and how long to measure."""

    name: str
    width: int
    inner: int
    rows: int  # rows of a microbatch
    microbatches: int
    rounds: int
    steps: int  # in a round
    cpu_bar: float


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """A schedule on so many ranks, with stages of one size."""

    size: StageSize
    schedule: ScheduleName
    pp: int
    virtual_stages: int = 1

    @property
    def name(self) -> str:
        return f"{self.size.name}: {self.schedule}, pp {self.pp}"

    def build(self) -> Schedule:
        return build_schedule(
            self.schedule, pp=self.pp, microbatches=self.size.microbatches, virtual_stages=self.virtual_stages
        )


OVERHEAD = StageSize(name="overhead", width=64, inner=64, rows=16, microbatches=32, rounds=7, steps=5, cpu_bar=0.85)
COMPUTE = StageSize(name="compute", width=512, inner=2048, rows=256, microbatches=8, rounds=3, steps=1, cpu_bar=1.0)
SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zb", 2),
)
PEERS: dict[ScheduleName, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
}
CASES = [
    PipelineCase(size=size, schedule=schedule, pp=pp, virtual_stages=virtual_stages)
    for size in (OVERHEAD, COMPUTE)
    for schedule, virtual_stages in SCHEDULES
    for pp in (2, 4)
]
MEMORY = PipelineCase(size=OVERHEAD, schedule="1f1b", pp=2)
_MEMORY_NAME = f"memory: {_MEMORY_STEPS} steps of {MEMORY.name}, after against before"


def bench_pipeline(options: Options) -> list[ResultRow]:
    """Measures every case that `options` names, and returns their rows."""
    cases = {case.name: case for case in CASES}
    bubbles = {bench_bubble.name_of(name): (name, virtual_stages) for name, virtual_stages in bench_bubble.SCHEDULES}
    rows: list[ResultRow] = []
    for name in announced(chosen([*cases, *bubbles, _MEMORY_NAME], options)):
        if name in cases:
            rows += _against_torch(cases[name], options)
        elif name in bubbles:
            rows.append(_bubble(*bubbles[name], options))
        else:
            rows.append(_memory())
    return rows


def _against_torch(case: PipelineCase, options: Options) -> list[ResultRow]:
    rounds, steps = options.rounds or case.size.rounds, options.steps or case.size.steps
    return rows_against_peer(case.name, run_ranks(measure, case, rounds, steps, world_size=case.pp), case.size.cpu_bar)


def _bubble(schedule: ScheduleName, virtual_stages: int, options: Options) -> ResultRow:
    steps = options.steps or bench_bubble.STEPS
    found = run_ranks(bench_bubble.measure_bubble, schedule, virtual_stages, steps, world_size=bench_bubble.PP)
    return bench_bubble.bubble_row(schedule, *found)


def _memory() -> ResultRow:
    before, after = run_ranks(measure_memory, MEMORY, _MEMORY_STEPS, world_size=MEMORY.pp)
    return ResultRow(case=_MEMORY_NAME, ours=after, peer=before, unit="rss_mib", ratio=after / before, bar=_MEMORY_BAR)


def measure(case: PipelineCase, rounds: int, steps: int) -> list[Round]:
    """Runs on every rank: checks both contestants against each other, then times them in turn."""
    ours, our_stages = build_ours(case)
    peer, peer_stages = build_peer(case)
    _check_agreement(ours(), peer(), our_stages, peer_stages)
    return time_in_turn(lambda _: ours(), lambda _: peer(), rounds=rounds, steps=steps)


def measure_memory(case: PipelineCase, steps: int) -> tuple[float, float]:
    """Returns the resident memory of both ranks together, in MiB, before and after so many steps. Some steps go before,
    to warm up."""
    step, _ = build_ours(case)
    for _ in range(20):
        step()
    before = _resident_mib()
    for _ in range(steps):
        step()
    return before, _resident_mib()


def build_ours(case: PipelineCase) -> tuple[Step, list[nn.Module]]:
    """Returns a step of this project's runtime, which gives the loss on the last stage's rank, and this rank's
    stages."""
    schedule, pp, stages = case.build(), _mesh(case), _own_stages(case)
    boundary = TensorSpec((case.size.rows, case.size.width))
    runtime = PipelineRuntime(stages, schedule, pp, _loss, boundaries=boundary)
    inputs, labels = _batch(case)

    def step() -> float:
        _clear_gradients(stages)
        return runtime.run(inputs, labels).item()

    return step, stages


def build_peer(case: PipelineCase) -> tuple[Step, list[nn.Module]]:
    """Returns torch's step and stages, with shapes known beforehand and nothing done to gradients that ours leaves
    out."""
    schedule, pp, modules = case.build(), _mesh(case), _own_stages(case)
    rank, example = pp.get_local_rank(), torch.empty(case.size.rows, case.size.width, requires_grad=True)
    stages: list[Any] = [  # torch's schedules take a list of their stages' base class, invariantly
        PipelineStage(
            module,
            index,
            schedule.stages,
            torch.device("cpu"),
            input_args=example if index > 0 else example.detach(),
            output_args=example,
            group=pp.get_group(),
        )
        for index, module in zip(schedule.stages_of(rank), modules, strict=True)
    ]
    single_or_all = stages[0] if case.virtual_stages == 1 else stages
    peer = PEERS[case.schedule](single_or_all, case.size.microbatches, loss_fn=_loss, scale_grads=False)
    inputs, labels = _batch(case)
    first = (inputs.flatten(0, 1),) if rank == schedule.placement[0] else ()
    target = labels.flatten(0, 1) if rank == schedule.placement[-1] else None

    def step() -> float:
        _clear_gradients(modules)
        losses: list[Tensor] = []
        peer.step(*first, target=target, losses=losses, return_outputs=False)
        return sum(losses, torch.zeros(())).item()

    return step, modules


def _own_stages(case: PipelineCase) -> list[nn.Module]:
    """Returns the modules of this rank's stages, with the same weights at each call."""
    torch.manual_seed(0)
    width, inner = case.size.width, case.size.inner
    schedule = case.build()
    stages = [
        nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), nn.LayerNorm(width))
        for _ in range(schedule.stages)
    ]
    return [stages[index] for index in schedule.stages_of(dist.get_rank())]


def _mesh(case: PipelineCase) -> DeviceMesh:
    return init_device_mesh("cpu", (case.pp,), mesh_dim_names=("pp",))


def _batch(case: PipelineCase) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    inputs, labels = torch.randn(2, case.size.microbatches, case.size.rows, case.size.width)
    return inputs, labels


def _loss(output: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, label)


def _clear_gradients(stages: list[nn.Module]) -> None:
    for stage in stages:
        stage.zero_grad()


def _check_agreement(
    our_loss: float, peer_loss: float, our_stages: list[nn.Module], peer_stages: list[nn.Module]
) -> None:
    """Raises RankError where the two have not computed the same: the timings would compare two things."""
    pairs = [(our_loss, peer_loss)]
    for ours, peer in zip(our_stages, peer_stages, strict=True):
        for mine, other in zip(ours.parameters(), peer.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            pairs.append((mine.grad.norm().item(), other.grad.norm().item()))
    for ours_is, peer_is in pairs:
        if not abs(ours_is - peer_is) <= _AGREEMENT * abs(peer_is):
            raise RankError(f"ours computes {ours_is:.6g} and the peer {peer_is:.6g}: not the same training")


def _resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    total = torch.tensor(pages * _PAGE_MIB)
    dist.all_reduce(total)
    return total.item()

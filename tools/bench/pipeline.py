"""`bench pipeline`: times the pipeline runtime against torch.distributed.pipelining.

Both run the same stages and schedule in the same processes, without trainer, data parallelism or
optimizer. Losses and gradient norms must agree before timing. At size `overhead`, stages compute
almost nothing. At `compute`, matmuls dominate. Bubble cases compare the measured bubble with the
simulated one, in percent of all rank time. The simulation uses median measured durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder
from parallel3d.timeline.simulate import measured_times, simulate
from parallel3d.timeline.spans import Span, Timeline
from parallel3d.tools.bench.harness import (
    Case,
    TimedCase,
    check_agreement,
    lacks_devices,
    run_cases,
    time_in_turn,
)
from parallel3d.tools.bench.report import Options, ResultRow, Round, row_of
from parallel3d.tools.local_ranks import own_device, run_ranks

BUBBLE_STEPS = 7
BUBBLE_POINTS = 5.0  # largest excess over the simulated bubble, in percentage points


@dataclass(frozen=True, kw_only=True)
class StageSize:
    """Size of each stage, and number of microbatches, rounds and steps."""

    name: str
    width: int
    inner: int
    rows: int  # Rows per microbatch.
    microbatches: int
    rounds: int
    steps: int  # Steps per round.
    cpu_bar: float  # Largest ratio of CPU time, ours / torch.
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """A schedule on `pp` ranks with equal stages."""

    size: StageSize
    schedule: ScheduleName
    pp: int
    virtual_stages: int = 1

    @property
    def name(self) -> str:
        return f"{self.size.name}: {self.schedule}, pp {self.pp}"

    def build(self) -> Schedule:
        return build_schedule(
            self.schedule,
            pp=self.pp,
            microbatches=self.size.microbatches,
            virtual_stages=self.virtual_stages,
        )


OVERHEAD = StageSize(
    name="overhead",
    width=64,
    inner=64,
    rows=16,
    microbatches=32,
    rounds=7,
    steps=5,
    cpu_bar=0.85,
)
# Matmuls take tens of milliseconds, so transfers are negligible.
COMPUTE = StageSize(
    name="compute",
    width=512,
    inner=2048,
    rows=256,
    microbatches=8,
    rounds=3,
    steps=1,
    cpu_bar=1.0,
)
GPU_COMPUTE = replace(COMPUTE, width=4096, inner=16384, rows=2048, rounds=5, steps=3)
TORCH_SCHEDULES: dict[ScheduleName, tuple[int, Any]] = {  # -> (stages per rank, class)
    "1f1b": (1, Schedule1F1B),
    "interleaved_1f1b": (2, ScheduleInterleaved1F1B),
    "interleaved_zb": (2, ScheduleInterleavedZeroBubble),
}
BUBBLE_SCHEDULES: dict[ScheduleName, int] = {  # schedule -> stages per rank
    "1f1b": 1,
    "gpipe": 1,
    "interleaved_1f1b": 2,
    "zb_h1": 1,
    "zb_v": 2,
}


def bench_pipeline(options: Options) -> list[ResultRow]:
    """Measures the selected cases and returns their rows."""
    overhead = OVERHEAD
    compute = COMPUTE
    if options.device == "cuda":
        overhead, compute = (replace(size, device="cuda") for size in (OVERHEAD, GPU_COMPUTE))
    cases: dict[str, Case] = {}
    for size in (overhead, compute):
        for schedule, (stages, _) in TORCH_SCHEDULES.items():
            for pp in (2, 4):
                case = PipelineCase(size=size, schedule=schedule, pp=pp, virtual_stages=stages)
                cases[case.name] = TimedCase(
                    measure=measure,
                    arguments=(case,),
                    world_size=pp,
                    rounds=size.rounds,
                    steps=size.steps,
                    cpu_bar=size.cpu_bar if size.device == "cpu" else None,
                )
    for schedule, stages in BUBBLE_SCHEDULES.items():
        case = PipelineCase(size=compute, schedule=schedule, pp=2, virtual_stages=stages)
        name = f"bubble: {schedule}, pp {case.pp}, measured against simulated"
        cases[name] = partial(_bubble, name, case)
    return run_cases(cases, options)


def _bubble(name: str, case: PipelineCase, options: Options) -> list[ResultRow]:
    if lacks_devices(case.size.device, case.pp):
        return []
    steps = options.steps or BUBBLE_STEPS
    device = case.size.device
    found = run_ranks(measure_bubble, case, steps, world_size=case.pp, device=device)
    return [row_of(name, "bubble_percent", [found], bar=(found[1] + BUBBLE_POINTS) / found[1])]


def measure(case: PipelineCase, rounds: int, steps: int) -> list[Round]:
    """Checks that both runtimes agree, then times them alternately. Runs on every rank."""
    our_stages = own_stages(case)
    peer_stages = own_stages(case)
    ours = _from_no_gradients(build_ours(case, our_stages), our_stages)
    peer = _from_no_gradients(build_peer(case, peer_stages), peer_stages)
    results = [("loss", ours(0), peer(0))]
    for our_stage, peer_stage in zip(our_stages, peer_stages, strict=True):
        for mine, other in zip(our_stage.parameters(), peer_stage.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            results.append(("a gradient's norm", mine.grad.norm().item(), other.grad.norm().item()))
    check_agreement(results)
    return time_in_turn(ours, peer, rounds=rounds, steps=steps, device=own_device(case.size.device))


def measure_bubble(case: PipelineCase, steps: int) -> tuple[float, float]:
    """Returns the (measured, simulated) bubble in percent. Runs on every rank.

    Both are from the step with the median difference.
    """
    schedule = case.build()
    step = build_ours(case, own_stages(case))
    pairs = []
    for number in range(steps + 1):
        recorder = Recorder(own_device(case.size.device))
        dist.barrier()
        step(recorder=recorder)
        if number == 0:
            continue  # warmup
        everyone: list[list[Span]] = [[]] * case.pp
        # The ranks of one host share a clock.
        dist.all_gather_object(everyone, recorder.spans(dist.get_rank()))
        spans = tuple(span for rank in everyone for span in rank)
        measured = Timeline(name=schedule.name, ranks=case.pp, spans=spans)
        simulated = simulate(schedule, measured_times(schedule, spans))
        pairs.append((100 * measured.bubble_fraction, 100 * simulated.bubble_fraction))
    pairs.sort(key=lambda pair: pair[0] - pair[1])
    return pairs[len(pairs) // 2]


def own_stages(case: PipelineCase) -> list[nn.Module]:
    """Returns the modules of this rank's stages. Every call returns the same weights."""
    torch.manual_seed(0)
    width = case.size.width
    inner = case.size.inner
    schedule = case.build()
    stages = [
        nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), nn.LayerNorm(width)
        )
        for _ in range(schedule.stages)
    ]
    device = own_device(case.size.device)
    return [stages[index].to(device) for index in schedule.stages_of(dist.get_rank())]


def build_ours(case: PipelineCase, stages: list[nn.Module]) -> Callable[..., Tensor]:
    """Returns a step of parallel3d's runtime, which returns the loss on the last stage's rank."""
    pp = init_device_mesh(case.size.device, (case.pp,), mesh_dim_names=("pp",))
    boundary = TensorSpec((case.size.rows, case.size.width))
    runtime = PipelineRuntime(
        stages,
        case.build(),
        pp,
        nn.functional.mse_loss,
        boundaries=boundary,
        device=own_device(case.size.device),
    )
    return partial(runtime.run, *_batch(case))


def build_peer(case: PipelineCase, modules: list[nn.Module]) -> Callable[[], Tensor]:
    """Returns a step of torch's schedule, with static shapes and without gradient scaling."""
    schedule = case.build()
    device = own_device(case.size.device)
    group = init_device_mesh(device.type, (case.pp,), mesh_dim_names=("pp",)).get_group()
    rank = dist.get_rank()
    example = torch.empty(case.size.rows, case.size.width, device=device, requires_grad=True)
    stages = [
        PipelineStage(
            module,
            index,
            schedule.stages,
            device,
            input_args=example if index > 0 else example.detach(),
            output_args=example,
            group=group,
        )
        for index, module in zip(schedule.stages_of(rank), modules, strict=True)
    ]
    single_or_all = stages if len(stages) > 1 else stages[0]
    build = TORCH_SCHEDULES[case.schedule][1]
    peer = build(
        single_or_all, case.size.microbatches, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    inputs, labels = _batch(case)
    first = (inputs.flatten(0, 1),) if rank == schedule.placement[0] else ()
    target = labels.flatten(0, 1) if rank == schedule.placement[-1] else None

    def step() -> Tensor:
        losses: list[Tensor] = []
        peer.step(*first, target=target, losses=losses, return_outputs=False)
        return sum(losses, torch.zeros((), device=device))

    return step


def _batch(case: PipelineCase) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    inputs, labels = torch.randn(2, case.size.microbatches, case.size.rows, case.size.width)
    device = own_device(case.size.device)
    return inputs.to(device), labels.to(device)


def _from_no_gradients(
    step: Callable[[], Tensor], stages: list[nn.Module]
) -> Callable[[int], float]:
    def cleared(index: int) -> float:
        for stage in stages:
            stage.zero_grad()
        return step().item()

    return cleared

"""The bubble cases of `bench pipeline`: how long a rank of the pipeline really computes nothing, against what the
simulator says of the same schedule with the actions' own median times. Ours is the measured share and the peer the
simulated one, both in % of all rank-time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder
from parallel3d.timeline.simulate import measured_times, simulate
from parallel3d.timeline.spans import Span, Timeline
from parallel3d.tools.bench.report import ResultRow

SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_v", 2),
)
PP, MICROBATCHES, STEPS = 2, 8, 7
POINTS = 5.0  # by which the measured bubble may differ
WIDTH, INNER, ROWS = 512, 2048, 256  # matrix products of tens of milliseconds, beside which a transfer is nothing


def name_of(schedule: ScheduleName) -> str:
    return f"bubble: {schedule}, pp {PP}, measured against simulated"


def measure_bubble(name: ScheduleName, virtual_stages: int, steps: int) -> tuple[float, float]:
    """Runs on every rank, and returns (measured, simulated) in % of the step whose difference is the median. Rank 0's
    result is the right one."""
    schedule = build_schedule(name, pp=PP, microbatches=MICROBATCHES, virtual_stages=virtual_stages)
    pp = init_device_mesh("cpu", (PP,), mesh_dim_names=("pp",))
    stages = [
        nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH))
        for _ in schedule.stages_of(pp.get_local_rank())
    ]
    runtime = PipelineRuntime(
        stages, schedule, pp, nn.functional.mse_loss, boundaries=TensorSpec((ROWS, WIDTH)), device="cpu"
    )
    inputs, labels = torch.randn(2, MICROBATCHES, ROWS, WIDTH)
    pairs = []
    for step in range(steps + 1):
        recorder = Recorder(torch.device("cpu"))
        dist.barrier()
        runtime.run(inputs, labels, recorder=recorder)
        if step > 0:  # the first one warms up
            pairs.append(_bubbles(schedule, recorder.spans(dist.get_rank())))
    pairs.sort(key=lambda pair: pair[0] - pair[1])
    return pairs[len(pairs) // 2]


def bubble_row(name: ScheduleName, measured: float, simulated: float) -> ResultRow:
    return ResultRow(
        case=name_of(name),
        ours=measured,
        peer=simulated,
        unit="bubble_percent",
        ratio=measured / simulated,
        bar=(simulated + POINTS) / simulated,
    )


def _bubbles(schedule: Schedule, spans: list[Span]) -> tuple[float, float]:
    everyone: list[list[Span]] = [[]] * len(schedule.ranks)
    dist.all_gather_object(everyone, spans)  # one host, one clock
    all_spans = tuple(span for rank in everyone for span in rank)
    measured = Timeline(name=schedule.name, ranks=len(schedule.ranks), stages=schedule.stages, spans=all_spans)
    simulated = simulate(schedule, measured_times(schedule, all_spans))
    return 100 * measured.bubble_fraction, 100 * simulated.bubble_fraction

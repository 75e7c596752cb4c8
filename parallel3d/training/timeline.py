"""Measures the timeline of one training step on all pipeline ranks, and writes it beside its
simulation."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch.distributed as dist

from parallel3d.data.loader import Batch
from parallel3d.errors import writing
from parallel3d.timeline.draw import draw_trace
from parallel3d.timeline.recorder import Recorder
from parallel3d.timeline.simulate import measured_times, simulate
from parallel3d.timeline.spans import Span, Timeline
from parallel3d.training.step_result import StepResult
from parallel3d.training.trainer import Trainer


@dataclass(frozen=True)
class TimelineReport:
    """The share of rank-time in which pipeline ranks computed nothing, measured and as the schedule
    has it."""

    path: Path
    measured_bubble: float
    simulated_bubble: float

    def __str__(self) -> str:
        return (
            f"timeline: bubble {self.measured_bubble:.1%} measured, {self.simulated_bubble:.1%} "
            f"simulated from the actions' own times; {self.path}"
        )


def traced_step(
    trainer: Trainer, batch: Batch, folder: Path
) -> tuple[StepResult, TimelineReport | None]:
    """Trains a step whose actions all ranks record, and writes them as a trace that Perfetto opens:
    `folder/timeline_step_00000007.json` holds the pipeline of each data and tensor rank, and the
    simulated one last. Every rank calls it; rank 0 writes the file and returns the report."""
    dist.barrier()
    start_s = time.perf_counter()
    recorder = Recorder(trainer.device)
    result = trainer.train_step(batch, recorder)
    place = trainer.recipe.parallel.coordinates(dist.get_rank())
    pipeline = f"dp_replicate {place.dp_replicate}, dp_shard {place.dp_shard}, tp {place.tp}"
    own = socket.gethostname(), start_s, pipeline, recorder.spans(place.pp)
    everyone = [own] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, everyone)
    if everyone is None:
        return result, None
    # The ranks of one host share a clock; on several hosts each rank's time starts where the ranks
    # last met.
    is_one_host = len({host for host, _, _, _ in everyone}) == 1
    spans: dict[str, list[Span]] = {}  # by pipeline of the mesh
    for _, its_start_s, its_pipeline, recorded in everyone:
        origin_s = start_s if is_one_host else its_start_s
        spans.setdefault(its_pipeline, []).extend(
            span._replace(start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)
            for span in recorded
        )
    schedule = trainer.schedule_of(len(batch.inputs))
    measured = [
        Timeline(
            name=f"{schedule.name}, measured, {of_pipeline}",
            ranks=len(schedule.ranks),
            spans=tuple(found),
        )
        for of_pipeline, found in spans.items()
    ]
    simulated = simulate(
        schedule,
        measured_times(schedule, [span for timeline in measured for span in timeline.spans]),
    )
    path = folder / f"timeline_step_{trainer.step:08d}.json"
    with writing(path):
        path.write_text(draw_trace(*measured, simulated))
    bubble = mean(timeline.bubble_fraction for timeline in measured)
    return result, TimelineReport(path, bubble, simulated.bubble_fraction)

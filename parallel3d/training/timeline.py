"""Records the timeline of one training step on all pipeline ranks, with its simulation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch.distributed as dist

from parallel3d.data.loader import Batch
from parallel3d.errors import writing
from parallel3d.mesh import Role
from parallel3d.timeline.draw import draw_trace
from parallel3d.timeline.recorder import Recorder
from parallel3d.timeline.simulate import measured_times, simulate
from parallel3d.timeline.spans import Span, Timeline
from parallel3d.training.step_result import StepResult
from parallel3d.training.trainer import Trainer


def traced_step(
    trainer: Trainer, batch: Batch, folder: Path, say: Callable[[str], None]
) -> StepResult:
    """Runs a step and writes its trace for Perfetto, such as `timeline_step_00000007.json`.

    The trace holds the pipeline of each data-parallel and tensor-parallel rank, and last the
    simulation. Rank 0 writes the file to `folder` and prints the bubble fraction. Requests to stop
    or save wait for the next step. Collective.
    """
    dist.barrier()
    start_s = time.perf_counter()  # All ranks left the barrier together, so this is time 0 on each.
    recorder = Recorder(trainer.device)
    result = trainer.train_step(batch, recorder)
    place = trainer.recipe.parallel.coordinates(dist.get_rank())._asdict()
    own_spans = recorder.spans(place.pop(Role.SPLIT_LAYERS), start_s)
    pipeline = ", ".join(f"{axis} {rank}" for axis, rank in place.items())
    everyone = [(pipeline, own_spans)] * dist.get_world_size()
    dist.all_gather_object(everyone, everyone[0])
    if dist.get_rank():
        return result
    by_pipeline: dict[str, list[Span]] = {}
    for name, spans in everyone:
        by_pipeline.setdefault(name, []).extend(spans)
    schedule = trainer.schedule_of(len(batch.inputs))
    ranks = len(schedule.ranks)
    measured = [
        Timeline(name=f"{schedule.name}, measured, {name}", ranks=ranks, spans=tuple(spans))
        for name, spans in by_pipeline.items()
    ]
    times = measured_times(schedule, [span for _, spans in everyone for span in spans])
    simulated = simulate(schedule, times)
    path = folder / f"timeline_step_{trainer.step:08d}.json"
    with writing(path):
        path.write_text(draw_trace(*measured, simulated))
    bubble = mean(timeline.bubble_fraction for timeline in measured)
    say(
        f"timeline: bubble {bubble:.1%} measured, {simulated.bubble_fraction:.1%} simulated with "
        f"the measured durations; {path}"
    )
    return result

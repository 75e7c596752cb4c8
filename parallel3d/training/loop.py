"""The loop of a run: steps, and between them validation, metrics and checkpoints."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.checkpoint.store import checkpoint_path, keep_newest
from parallel3d.data.loader import BatchLoader, batches_ahead
from parallel3d.errors import PreemptedError
from parallel3d.launch.signals import StopRequest
from parallel3d.reporting import metrics
from parallel3d.reporting.metrics import MetricsFile, StepMetrics, Stopwatch
from parallel3d.reporting.profiler import ProfilerWindow
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.hooks import StepResult
from parallel3d.training.state import save_trainer
from parallel3d.training.timeline import traced_step
from parallel3d.training.trainer import Trainer


def fit(
    trainer: Trainer,
    loaders: tuple[BatchLoader, BatchLoader],
    checkpoints: Path,
    metrics_file: MetricsFile | None,
    progress: ProgressDisplay,
    stop: StopRequest,
    *,
    peak_flops: float | None = None,
) -> None:
    """Trains from the trainer's step to the recipe's last. Every rank calls it; one rank has `metrics_file`. `loaders`
    give this data rank's batches for training and for validation. `peak_flops` of one device is what MFU is the share
    of. Raises NonFiniteError, SaveError and DataError, and PreemptedError after the step in which any rank had a
    `stop`."""
    recipe, (training, validation), watch, waiting = trainer.recipe, loaders, Stopwatch(), Stopwatch()
    reported_tokens = trainer.tokens
    ahead = batches_ahead(training, range(trainer.step, recipe.train.steps), trainer.device)
    folder = checkpoints.parent / "profile"
    profiler = ProfilerWindow(recipe.logging, folder, rank=dist.get_rank(), device=trainer.device)
    with closing(ahead) as batches, profiler:
        for step in range(trainer.step + 1, recipe.train.steps + 1):
            last = step == recipe.train.steps
            report, val_loss = None, None
            with profiler.step(step), watch.timing():
                with waiting.timing():
                    batch = next(batches)
                if step == recipe.logging.timeline:
                    result, report = traced_step(trainer, batch, checkpoints.parent)
                else:
                    result = trainer.train_step(batch, is_asked_to_stop=stop.is_made)
            progress.step_done(step)
            for note in (report, profiler.end_after(step)):
                if note is not None:
                    progress.say(str(note))
            if _due(recipe.train.eval_every, step, last):
                val_loss = trainer.evaluate(validation.batch(0))
            if val_loss is not None or _due(recipe.logging.every, step, last) or step == 1:
                line = measure(trainer, result, watch, waiting, trainer.tokens - reported_tokens, val_loss, peak_flops)
                reported_tokens = trainer.tokens
                progress.measured(line)
                if metrics_file is not None:
                    metrics_file.write(line)
            path = checkpoint_path(checkpoints, step)
            if result.is_asked_to_stop or _due(recipe.checkpoint.every, step, last):
                save_trainer(trainer, path)
                if dist.get_rank() == 0:
                    keep_newest(checkpoints, recipe.checkpoint.keep)
            if result.is_asked_to_stop and not last:
                raise PreemptedError(
                    f"stopped by SIGTERM after step {step}, saved: {path}; checkpoint.resume=auto goes on"
                )


def measure(
    trainer: Trainer,
    result: StepResult,
    watch: Stopwatch,
    waiting: Stopwatch,
    tokens: int,
    val_loss: float | None,
    peak: float | None,
) -> StepMetrics:
    """Returns the metrics of a step; every rank calls it. `tokens` counts those of the steps that `watch` has timed,
    and `waiting` has timed what they waited for batches; `peak` is the FLOP/s of one device."""
    recipe = trainer.recipe
    seconds, steps = watch.read()
    per_device = tokens / seconds / recipe.parallel.world_size
    worst = torch.tensor(
        (*metrics.peak_memory_bytes(trainer.device), waiting.read()[0] / steps),
        dtype=torch.float64,
        device=trainer.device,
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    peak_bytes, reserved_bytes, data_wait_s = worst.tolist()
    return StepMetrics(
        step=trainer.step,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        tokens=trainer.tokens,
        step_time_s=seconds / steps,
        data_wait_s=data_wait_s,
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_device=per_device,
        mfu=None if peak is None else per_device * metrics.flops_per_token(recipe.model, recipe.train.seq_len) / peak,
        peak_memory_bytes=round(peak_bytes),
        peak_reserved_bytes=round(reserved_bytes) or None,
        val_loss=val_loss,
        loss_scale=result.loss_scale,
        skipped_steps=trainer.skipped_steps,
    )


def _due(every: int | None, step: int, last: bool) -> bool:
    """True after each `every` steps and after the last one; never where `every` is None."""
    return every is not None and (last or step % every == 0)

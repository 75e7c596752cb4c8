"""The loop of a run: steps, and between them validation, metrics and checkpoints."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.checkpoint.saver import Saver
from parallel3d.checkpoint.store import checkpoint_path
from parallel3d.checkpoint.together import collect as collect_from_all
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import BatchLoader, EvaluationSet, batches_ahead
from parallel3d.errors import CtrlCError, Parallel3dError, PreemptedError
from parallel3d.export import ExportForm, export
from parallel3d.launch.signals import StopRequest
from parallel3d.reporting import metrics
from parallel3d.reporting.metrics import MetricsFile, StepMetrics, Stopwatch
from parallel3d.reporting.profiler import ProfilerWindow
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.callbacks import VALIDATION, Callbacks
from parallel3d.training.hooks import StepResult
from parallel3d.training.state import state_of
from parallel3d.training.timeline import traced_step
from parallel3d.training.trainer import Trainer


def fit(
    trainer: Trainer,
    loaders: tuple[BatchLoader, Sequence[EvaluationSet]],
    checkpoints: Path,
    metrics_file: MetricsFile | None,
    progress: ProgressDisplay,
    stop: StopRequest,
    *,
    callbacks: Callbacks,
    peak_flops: float | None = None,
) -> None:
    """Trains from the trainer's step to the recipe's last, or until a callback asks to stop. Every rank calls it; one
    rank has `metrics_file`. `loaders` give this data rank's batches for training and for each evaluation. `peak_flops`
    of one device is what MFU is the share of. Raises NonFiniteError, SaveError and DataError, and PreemptedError after
    the step in which any rank had a `stop`."""
    recipe, (training, evaluations), watch, waiting = trainer.recipe, loaders, Stopwatch(), Stopwatch()
    reported_tokens = trainer.tokens
    ahead = batches_ahead(training, range(trainer.step, recipe.train.steps), trainer.device)
    folder = checkpoints.parent / "profile"
    profiler = ProfilerWindow(recipe.logging, folder, rank=dist.get_rank(), device=trainer.device)
    saver = Saver(recipe.checkpoint, saved=lambda path: callbacks.tell("saved", trainer.step, path), say=progress.say)
    with closing(ahead) as batches, profiler, saver, garbage_collected(recipe.train.gc_every) as collect:
        for step in range(trainer.step + 1, recipe.train.steps + 1):
            report, losses = None, None
            with profiler.step(step), watch.timing():
                with waiting.timing():
                    batch = next(batches)
                if step == recipe.logging.timeline:
                    result, report = traced_step(trainer, batch, checkpoints.parent)
                else:
                    is_asked_to_stop = stop.is_made or callbacks.is_asked_to_stop or saver.has_failed
                    result = trainer.train_step(batch, is_asked_to_stop=is_asked_to_stop)
                collect(step)
            signum = 0
            if result.is_asked_to_stop:
                # SIGTERM has a larger number than SIGINT, and counts where both were heard.
                signum, has_failed = _largest((stop.signum, saver.has_failed), trainer.device)
                if has_failed:
                    saver.finish()  # raises the error, on all ranks
            saver.step_done()
            is_preempted = signum != 0
            last = step == recipe.train.steps or (result.is_asked_to_stop and not is_preempted)
            progress.step_done(step)
            callbacks.tell("step_done", step, result)
            for note in (report, profiler.end_after(step)):
                if note is not None:
                    progress.say(str(note))
            if _due(recipe.train.eval_every, step, last):
                losses = {each.name: trainer.evaluate_all(each.batches) for each in evaluations}
                callbacks.tell("evaluated", step, losses)
            if losses is not None or _due(recipe.logging.every, step, last) or step == 1:
                line = measure(trainer, result, watch, waiting, trainer.tokens - reported_tokens, losses, peak_flops)
                reported_tokens = trainer.tokens
                progress.measured(line)
                if metrics_file is not None:
                    metrics_file.write(line)
                callbacks.tell("measured", step, line)
            path = checkpoint_path(checkpoints, step)
            if is_preempted or _due(recipe.checkpoint.every, step, last):
                state, saved_progress = state_of(trainer, None if losses is None else losses.get(VALIDATION))
                exported, then = recipe.checkpoint.export, None
                if (exported == "all" and not is_preempted) or (exported != "none" and last):
                    then = partial(export_saved, recipe, path, checkpoints.parent / "export" / path.name)
                saver.save(state, saved_progress, path, to_yaml(recipe), is_last=last or is_preempted, then=then)
            if is_preempted and not last:
                by, error = ("Ctrl-C", CtrlCError) if signum == signal.SIGINT else ("SIGTERM", PreemptedError)
                raise error(f"stopped by {by} after step {step}, saved: {path}; checkpoint.resume=auto goes on")
            if last and step < recipe.train.steps:
                progress.say(f"stopped after step {step}: {callbacks.stop_reason}")
                break


@contextmanager
def garbage_collected(every: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step. It collects Python's garbage after each `every` steps, and Python
    itself does not, so that all ranks pause in the same steps, not each in another. None: Python collects as always."""
    if every is None:
        yield lambda step: None
        return
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # what a run is made of stays to its end, and is not looked through again

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def export_saved(recipe: Recipe, checkpoint: Path, to: Path, group: dist.ProcessGroup | None) -> str:
    """Writes the model of a checkpoint as a folder that transformers opens, and returns a line for the user. Rank 0
    writes, and tells the others after each tensor that it goes on, so that none waits for longer than a tensor takes.
    Every rank of the group calls it; an error is raised on all of them."""
    form = ExportForm.of(recipe)
    written: Iterator[str] = export(checkpoint, to, form, overwrite=True) if dist.get_rank() == 0 else iter(())
    failed: list[Parallel3dError] = []

    def goes_on() -> bool:
        try:
            return next(written, None) is not None
        except Parallel3dError as error:
            failed.append(error)
            return False

    def end() -> None:
        if failed:
            raise failed[0]

    while any(_largest([goes_on()], torch.device("cpu"), group)):
        pass
    collect_from_all(end, lambda everyone: everyone, group)
    return "; ".join((f"exported: {to}", *form.notes))


def _largest(numbers: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the largest that any rank of the group has of each number; every rank calls it."""
    found = torch.tensor([float(number) for number in numbers], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in found.tolist()]


def measure(
    trainer: Trainer,
    result: StepResult,
    watch: Stopwatch,
    waiting: Stopwatch,
    tokens: int,
    losses: Mapping[str, float] | None,
    peak: float | None,
) -> StepMetrics:
    """Returns the metrics of a step; every rank calls it. `tokens` counts those of the steps that `watch` has timed,
    and `waiting` has timed what they waited for batches; `losses` are those of the evaluation sets by their names, and
    `peak` is the FLOP/s of one device."""
    recipe, sets = trainer.recipe, dict(losses or {})
    seconds, steps = watch.read()
    per_device = tokens / seconds / recipe.parallel.world_size
    mfu, weights = None, trainer.block_weights
    if peak is not None and weights is not None:
        mfu = per_device * metrics.flops_per_token(recipe.model, weights, recipe.train.seq_len) / peak
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
        mfu=mfu,
        peak_memory_bytes=round(peak_bytes),
        peak_reserved_bytes=round(reserved_bytes) or None,
        val_loss=sets.pop(VALIDATION, None),
        set_losses=sets,
        loss_scale=result.loss_scale,
        skipped_steps=trainer.skipped_steps,
    )


def _due(every: int | None, step: int, last: bool) -> bool:
    """True after each `every` steps and after the last one; never where `every` is None."""
    return every is not None and (last or step % every == 0)

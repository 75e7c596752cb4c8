"""The loop of a run: steps, and between them validation, metrics and checkpoints."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.checkpoint.saver import Saver
from parallel3d.checkpoint.store import checkpoint_path, list_checkpoints, step_of
from parallel3d.checkpoint.together import collect as collect_from_all
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import Batch, BatchLoader, EvaluationSet, batches_ahead
from parallel3d.data.order import LeftOut
from parallel3d.diagnosis.stragglers import OwnTime, Stragglers, work_clock
from parallel3d.errors import CtrlCError, Parallel3dError, PreemptedError
from parallel3d.export import ExportForm, export
from parallel3d.launch.signals import StopRequest, signal_name
from parallel3d.layers.collectives import all_gather_single
from parallel3d.reporting import metrics
from parallel3d.reporting.metrics import MetricsFile, StepClocks, StepMetrics, Stopwatch
from parallel3d.reporting.profiler import ProfilerWindow
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.training.callbacks import VALIDATION, Callbacks
from parallel3d.training.hooks import StepResult
from parallel3d.training.state import of_rank_0, resume_from, state_of
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
    TrainingLoop(trainer, loaders, checkpoints, metrics_file, progress, stop, callbacks, peak_flops).run()


@dataclass
class TrainingLoop:
    """The steps of a run, and what is done between them. Its fields are the arguments of `fit`."""

    trainer: Trainer
    loaders: tuple[BatchLoader, Sequence[EvaluationSet]]
    checkpoints: Path
    metrics_file: MetricsFile | None
    progress: ProgressDisplay
    stop: StopRequest
    callbacks: Callbacks
    peak_flops: float | None

    def __post_init__(self) -> None:
        self.recipe = self.trainer.recipe
        device = self.trainer.device
        self.clocks = StepClocks(
            whole=Stopwatch(), data=Stopwatch(), work=Stopwatch(work_clock(device)), ran=Stopwatch(time.thread_time)
        )
        self.stragglers = Stragglers(self.recipe.parallel)
        self.reported_tokens = self.trainer.tokens
        self.run_dir = self.checkpoints.parent
        self.profiler = ProfilerWindow(
            self.recipe.logging, self.run_dir / "profile", rank=dist.get_rank(), device=self.trainer.device
        )
        self.saver = Saver(self.recipe.checkpoint, saved=self._tell_of_a_save, say=self.progress.say)

    def run(self) -> None:
        """Trains to the end."""
        with self.profiler, self.saver, garbage_collected(self.recipe.train.gc_every) as collect:
            is_done = self.trainer.step >= self.recipe.train.steps
            while not is_done:
                is_done = self.train(collect)

    def train(self, collect: Callable[[int], None]) -> bool:
        """Trains to the run's last step and returns True, or until the run goes back to a checkpoint."""
        steps = range(self.trainer.step, self.recipe.train.steps)
        loader = replace(self.loaders[0], left_out=self.trainer.left_out)
        with closing(batches_ahead(loader, steps, self.trainer.device)) as batches:
            while True:
                result = self.train_step(batches)
                collect(self.trainer.step)
                if self.recipe.train.on_spike == "rollback" and self.trainer.spikes.found and self.roll_back():
                    return False
                if self.step_done(result):
                    return True

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Trains the next step, timed, and recorded where the recipe asks for that."""
        step, report = self.trainer.step + 1, None
        with self.profiler.step(step), self.clocks.timing():
            with self.clocks.data.timing():
                batch = next(batches)
            if step == self.recipe.logging.timeline:
                result, report = traced_step(self.trainer, batch, self.run_dir)
            else:
                is_asked_to_stop = self.stop.is_made or self.callbacks.is_asked_to_stop or self.saver.has_failed
                result = self.trainer.train_step(batch, is_asked_to_stop=is_asked_to_stop)
        if report is not None:
            self.progress.say(str(report))
        if warning := result.left_out or self.trainer.spikes.found:
            self.progress.say(f"warning: {warning}")
        return result

    def step_done(self, result: StepResult) -> bool:
        """Tells of the step that is done, evaluates, measures and saves where that is due, and returns whether it was
        the run's last. Raises PreemptedError where a signal has asked to end the run."""
        step, train = self.trainer.step, self.recipe.train
        signum, wants_save, is_stopped = self.requests_heard(result)
        self.saver.step_done()
        is_last = step == train.steps or (is_stopped and not signum)
        if is_last and step < train.steps:
            self.trainer.end_early()
        self.progress.step_done(step)
        self.callbacks.tell("step_done", step, result)
        profiled = self.profiler.end_after(step)
        if profiled is not None:
            self.progress.say(profiled)
        losses = self.evaluate() if _due(train.eval_every, step, is_last) else None
        if losses is not None or _due(self.recipe.logging.every, step, is_last) or step == 1:
            self.report(result, losses)
        is_due = _due(self.recipe.checkpoint.every, step, is_last)
        if signum or wants_save or is_due:
            self.save(losses, is_last=is_last or signum != 0, is_on_time=is_last or (is_due and not signum))
        if signum:
            self.stop.is_answered()
        if wants_save and not signum and not is_last:
            self.progress.say(f"SIGUSR1: saves after step {step}, and goes on")
        if signum and not is_last:
            by, error = signal_name(signum), CtrlCError if signum == signal.SIGINT else PreemptedError
            path = checkpoint_path(self.checkpoints, step)
            raise error(f"stopped by {by} after step {step}, saved: {path}; checkpoint.resume=auto goes on")
        if is_last and step < train.steps:
            self.progress.say(f"stopped after step {step}: {self.callbacks.stop_reason}")
        return is_last

    def requests_heard(self, result: StepResult) -> tuple[int, bool, bool]:
        """Returns the signal that has asked any rank to end (0: none), whether one has asked any to save, and whether a
        callback asks to end the run. Raises the error of a save that has failed on any rank."""
        if not result.is_asked_to_stop:
            return 0, False, False
        wants_save, self.stop.wants_save = self.stop.wants_save, False
        # SIGTERM has a larger number than SIGINT and SIGHUP, and counts where several were heard.
        signum, saves, has_failed, is_stopped = _largest(
            (self.stop.signum, wants_save, self.saver.has_failed, self.callbacks.is_asked_to_stop), self.trainer.device
        )
        if has_failed:
            self.saver.finish()  # raises the error, on all ranks
        return signum, bool(saves), bool(is_stopped)

    def evaluate(self) -> dict[str, float]:
        """Returns the loss of each evaluation set by its name."""
        losses = {each.name: self.trainer.evaluate_all(each.batches) for each in self.loaders[1]}
        self.callbacks.tell("evaluated", self.trainer.step, losses)
        return losses

    def report(self, result: StepResult, losses: Mapping[str, float] | None) -> None:
        """Writes and shows the metrics of the steps since the line before, with the losses of an evaluation."""
        tokens = self.trainer.tokens - self.reported_tokens
        line, warning = measure(self.trainer, result, self.clocks, tokens, losses, self.peak_flops, self.stragglers)
        self.reported_tokens = self.trainer.tokens
        self.progress.measured(line)
        if warning is not None:
            self.progress.say(f"warning: {warning}")
        if self.metrics_file is not None:
            self.metrics_file.write(line)
        self.callbacks.tell("measured", self.trainer.step, line)

    def save(self, losses: Mapping[str, float] | None, *, is_last: bool, is_on_time: bool) -> None:
        """Saves a checkpoint, and exports one that is saved on time where the recipe asks for that."""
        path, exported, then = checkpoint_path(self.checkpoints, self.trainer.step), self.recipe.checkpoint.export, None
        state, progress = state_of(self.trainer, None if losses is None else losses.get(VALIDATION))
        if is_on_time and (exported == "all" or (exported == "last" and is_last)):
            then = partial(export_saved, self.recipe, path, self.run_dir / "export" / path.name)
        self.saver.save(state, progress, path, to_yaml(self.recipe), is_last=is_last, then=then)

    def roll_back(self) -> bool:
        """Goes back to the newest checkpoint from before the steps that are suspected of the spike, and has the run
        leave out their sequences, or those of the steps since the checkpoint where none is as old as that. Saves the
        checkpoint again, so that a run that is killed from here on resumes with what it leaves out. Returns False,
        with nothing done, where there is no checkpoint yet."""
        trainer, spike, why = self.trainer, self.trainer.step, self.trainer.spikes.found
        assert why is not None
        self.saver.finish()
        newest_first = of_rank_0(list_checkpoints(self.checkpoints)[::-1])
        if not newest_first:
            self.progress.say("there is no checkpoint yet to go back to, so the run goes on")
            return False
        history, skipped, left_out = trainer.spikes.history, trainer.skipped_by_rollbacks, trainer.left_out
        if trainer.local_sgd is not None:
            trainer.local_sgd.settle()  # what is still on its way would arrive in the parameters that are loaded
        innocent = max(0, spike - self.recipe.train.spike_steps)  # the last step before those that are suspected
        old_enough = [path for path in newest_first if step_of(path) <= innocent] or newest_first[-1:]
        loaded, lines = resume_from(trainer, old_enough, self.checkpoints)
        sequences = (self.recipe.batch_sizes.before(step) for step in (max(innocent, trainer.step), spike))
        suspects = left_out.span(*sequences)
        trainer.skipped_by_rollbacks = LeftOut.of((*skipped, suspects)).ranges
        trainer.spikes.history = history.back_at(loaded.spikes)
        for line in (f"goes back, and leaves out the sequences {suspects.first} to {suspects.last}", *lines):
            self.progress.say(line)
        state, progress = state_of(trainer, loaded.val_loss)
        path = checkpoint_path(self.checkpoints, trainer.step)
        self.saver.save(state, progress, path, to_yaml(self.recipe), is_last=False)
        self.reported_tokens = trainer.tokens
        for clock in (self.clocks.whole, self.clocks.data, self.clocks.work):
            clock.read()
        if self.metrics_file is not None:
            self.metrics_file.go_back(trainer.step)
            self.callbacks.tell_of_a_rollback(trainer.step, why, self.metrics_file.history)
        self.progress.step_done(trainer.step)
        return True

    def _tell_of_a_save(self, path: Path) -> None:
        self.callbacks.tell("saved", self.trainer.step, path)


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
    clocks: StepClocks,
    tokens: int,
    losses: Mapping[str, float] | None,
    peak: float | None,
    stragglers: Stragglers,
) -> tuple[StepMetrics, str | None]:
    """Returns the metrics of a step, and a warning where a rank is slow; every rank calls it. `tokens` counts those of
    the steps that `clocks` have timed; `losses` are those of the evaluation sets by their names, and `peak` is the
    FLOP/s of one device."""
    recipe, sets = trainer.recipe, dict(losses or {})
    (seconds, steps), (waited_s, _) = clocks.whole.read(), clocks.data.read()
    (work_s, _), (ran_s, _) = clocks.work.read(), clocks.ran.read()
    per_device = tokens / seconds / recipe.parallel.world_size
    mfu, weights = None, trainer.block_weights
    if peak is not None and weights is not None:
        mfu = per_device * metrics.flops_per_token(recipe.model, weights, recipe.train.seq_len) / peak
    own = (*metrics.peak_memory_bytes(trainer.device), waited_s / steps, work_s + waited_s, ran_s)
    sent = torch.tensor(own, dtype=torch.float64, device=trainer.device)
    gathered = sent.new_empty(dist.get_world_size() * len(own))
    all_gather_single(gathered, sent)
    peak_bytes, reserved_bytes, waits_s, works_s, ran = gathered.view(-1, len(own)).t().tolist()
    slowest, warning = stragglers.see([*map(OwnTime, works_s, ran)], steps)
    line = StepMetrics(
        step=trainer.step,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        tokens=trainer.tokens,
        step_time_s=seconds / steps,
        data_wait_s=max(waits_s),
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_device=per_device,
        mfu=mfu,
        peak_memory_bytes=round(max(peak_bytes)),
        peak_reserved_bytes=round(max(reserved_bytes)) or None,
        val_loss=sets.pop(VALIDATION, None),
        set_losses=sets,
        loss_scale=result.loss_scale,
        spikes=trainer.spikes.history.spikes,
        rollbacks=trainer.spikes.history.rollbacks,
        skipped_steps=trainer.skipped_steps,
        slowest_rank=None if slowest is None else slowest.rank,
        slowest_ratio=None if slowest is None else slowest.ratio,
    )
    return line, warning


def _due(every: int | None, step: int, last: bool) -> bool:
    """True after each `every` steps and after the last one; never where `every` is None."""
    return every is not None and (last or step % every == 0)

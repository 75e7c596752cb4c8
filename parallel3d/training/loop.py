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
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel3d.checkpoint.collectives import collect as collect_from_all
from parallel3d.checkpoint.saver import Saver
from parallel3d.checkpoint.store import checkpoint_path, list_checkpoints, step_of
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import Batch, BatchLoader, EvaluationSet, batches_ahead
from parallel3d.data.order import SkippedRanges
from parallel3d.diagnosis.stragglers import OwnTime, Stragglers, work_clock
from parallel3d.errors import CtrlCError, Parallel3dError, PreemptedError
from parallel3d.export import ExportForm, export
from parallel3d.launch.signals import StopRequest, signal_name
from parallel3d.layers.collectives import all_gather_single
from parallel3d.reporting import metrics
from parallel3d.reporting.metrics import MetricsFile, StepClocks, StepMetrics, Stopwatch
from parallel3d.reporting.profiler import ProfilerWindow
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.torch_private import limit_waits
from parallel3d.training.callbacks import VALIDATION, Callbacks
from parallel3d.training.state import of_rank_0, resume_from, state_of
from parallel3d.training.step_result import StepResult
from parallel3d.training.timeline import traced_step
from parallel3d.training.trainer import Trainer
from parallel3d.watch import heartbeat
from parallel3d.watch.heartbeat import phase


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
    """Trains from the trainer's step to the recipe's last, or until a callback asks to stop. Every
    rank calls it; one rank has `metrics_file`. `loaders` give this data rank's batches for training
    and for each evaluation. MFU is a share of `peak_flops` of one device. Raises NonFiniteError,
    SaveError and DataError, and PreemptedError after the step in which any rank had a `stop`."""
    TrainingLoop(
        trainer,
        loaders,
        checkpoints,
        metrics_file,
        progress,
        stop,
        callbacks,
        peak_flops,
    ).run()


class Requests(NamedTuple):
    """What any rank was asked to do during a step."""

    signum: int = 0  # the signal that asks to end; 0: none
    wants_save: bool = False
    is_stopped: bool = False  # by a callback


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
            whole=Stopwatch(),
            data=Stopwatch(),
            work=Stopwatch(work_clock(device)),
            ran=Stopwatch(time.thread_time),
        )
        self.stragglers = Stragglers(self.recipe.parallel)
        self.reported_tokens = self.trainer.tokens
        self.is_first_step = True  # of this process
        self.run_dir = self.checkpoints.parent
        self.profiler = ProfilerWindow(
            self.recipe.logging, self.run_dir / "profile", rank=dist.get_rank(), device=device
        )
        self.saver = Saver(self.recipe.checkpoint, saved=self._tell_saved, say=self.progress.say)

    def run(self) -> None:
        """Trains to the end."""
        with self.profiler, self.saver, garbage_collected(self.recipe.train.gc_every) as collect:
            is_done = self.trainer.step >= self.recipe.train.steps
            while not is_done:
                is_done = self.train(collect)

    def train(self, collect: Callable[[int], None]) -> bool:
        """Trains to the run's last step and returns True, or until the run goes back to a
        checkpoint."""
        steps = range(self.trainer.step, self.recipe.train.steps)
        loader = replace(self.loaders[0], left_out=self.trainer.left_out)
        rolls_back = self.recipe.train.on_spike == "rollback"
        with closing(batches_ahead(loader, steps, self.trainer.device)) as batches:
            while True:
                result = self.train_step(batches)
                collect(self.trainer.step)
                if rolls_back and result.spike and self.roll_back(result.spike):
                    return False
                if self.step_done(result):
                    return True

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Trains the next step, timed and profiled, and checks the ranks after it."""
        step, train, report = self.trainer.step + 1, self.recipe.train, None
        with self.profiler.step(step), self.clocks.timing():
            with phase("data"), self.clocks.data.timing():
                batch = next(batches)
            if step == self.recipe.logging.timeline:
                with phase("forward or backward"):
                    result, report = traced_step(self.trainer, batch, self.run_dir)
            else:
                is_asked_to_stop = (
                    self.stop.is_made or self.callbacks.is_asked_to_stop or self.saver.has_failed
                )
                with phase("forward or backward"):
                    result = self.trainer.train_step(batch, is_asked_to_stop=is_asked_to_stop)
        if self.is_first_step:  # kernels are loaded and ranks are connected
            limit_waits(train.timeout_s)
            self.is_first_step = False
        if is_due(train.compare_replicas_every, step):
            self.trainer.compare_replicas(f"step {step}")
        heartbeat.step_done(step)
        if report is not None:
            self.progress.say(str(report))
        if warning := result.left_out or result.spike:
            self.progress.say(f"warning: {warning}")
        return result

    def step_done(self, result: StepResult) -> bool:
        """Reports the step, then evaluates and saves if due. Returns True after the last step.
        Raises PreemptedError if a signal has asked to end the run."""
        step, steps = self.trainer.step, self.recipe.train.steps
        requests = self.receive_requests(result)
        self.saver.step_done()
        is_last = step == steps or (requests.is_stopped and not requests.signum)
        if is_last and step < steps:
            self.trainer.end_early()
        self.progress.step_done(step)
        self.callbacks.tell("step_done", step, result)
        profiled = self.profiler.end_after(step)
        if profiled is not None:
            self.progress.say(profiled)
        losses = None
        if is_due(self.recipe.train.eval_every, step, is_last):
            losses = self.evaluate()
        if losses is not None or step == 1 or is_due(self.recipe.logging.every, step, is_last):
            with phase("metrics"):
                self.report(result, losses)
        self.save_if_due(requests, losses, is_last=is_last)
        self.answer(requests, is_last=is_last)
        return is_last

    def receive_requests(self, result: StepResult) -> Requests:
        """Returns what any rank was asked to do. Raises the error of a save that has failed on any
        rank."""
        if not result.is_asked_to_stop:
            return Requests()
        wants_save, self.stop.wants_save = self.stop.wants_save, False
        # SIGTERM has a larger number than SIGINT and SIGHUP, so it wins.
        signum, saves, has_failed, is_stopped = _largest(
            (self.stop.signum, wants_save, self.saver.has_failed, self.callbacks.is_asked_to_stop),
            self.trainer.device,
        )
        if has_failed:
            self.saver.finish()  # raises the error, on all ranks
        return Requests(signum, bool(saves), bool(is_stopped))

    def save_if_due(
        self, requests: Requests, losses: Mapping[str, float] | None, *, is_last: bool
    ) -> None:
        signum, wants_save, _ = requests
        on_time = is_due(self.recipe.checkpoint.every, self.trainer.step, is_last)
        if signum or wants_save or on_time:
            exports = is_last or (on_time and not signum)
            with phase("save"):
                self.save(losses, is_last=is_last or signum != 0, exports=exports)

    def answer(self, requests: Requests, *, is_last: bool) -> None:
        """Reports that the requests were fulfilled. Raises the error that ends the run for a
        signal."""
        step, (signum, wants_save, _) = self.trainer.step, requests
        if signum:
            self.stop.is_answered()
        elif wants_save and not is_last:
            self.progress.say(f"SIGUSR1: saves after step {step}, and goes on")
        if signum and not is_last:
            error = CtrlCError if signum == signal.SIGINT else PreemptedError
            path = checkpoint_path(self.checkpoints, step)
            raise error(
                f"stopped by {signal_name(signum)} after step {step}, saved: {path}; "
                "checkpoint.resume=auto goes on"
            )
        if is_last and step < self.recipe.train.steps:
            self.progress.say(f"stopped after step {step}: {self.callbacks.stop_reason}")

    def evaluate(self) -> dict[str, float]:
        """Returns the loss of each evaluation set by its name."""
        trainer, sets = self.trainer, self.loaders[1]
        with phase("evaluation"):
            losses = {each.name: trainer.evaluate_all(each.batches) for each in sets}
        self.callbacks.tell("evaluated", self.trainer.step, losses)
        return losses

    def report(self, result: StepResult, losses: Mapping[str, float] | None) -> None:
        """Writes and shows the metrics of the steps since the line before, with the losses of an
        evaluation."""
        line, warning = self.measure(result, dict(losses or {}))
        self.reported_tokens = self.trainer.tokens
        self.progress.measured(line)
        if warning is not None:
            self.progress.say(f"warning: {warning}")
        if self.metrics_file is not None:
            self.metrics_file.write(line)
        self.callbacks.tell("measured", self.trainer.step, line)

    def measure(self, result: StepResult, sets: dict[str, float]) -> tuple[StepMetrics, str | None]:
        """Returns the metrics of the steps since the line before, with the losses of the evaluation
        `sets`, and a warning if a rank is slow. Every rank calls it."""
        trainer, recipe, clocks = self.trainer, self.recipe, self.clocks
        tokens = trainer.tokens - self.reported_tokens
        (seconds, steps), (waited_s, _) = clocks.whole.read(), clocks.data.read()
        (work_s, _), (ran_s, _) = clocks.work.read(), clocks.ran.read()
        per_device = tokens / seconds / recipe.parallel.world_size
        mfu = None
        if self.peak_flops is not None and trainer.block_weights is not None:
            flops = metrics.flops_per_token(
                recipe.model, trainer.block_weights, recipe.train.seq_len
            )
            mfu = per_device * flops / self.peak_flops
        peak_bytes, reserved_bytes, waits_s, works_s, ran = _from_all_ranks(
            (
                *metrics.peak_memory_bytes(trainer.device),
                waited_s / steps,
                work_s + waited_s,
                ran_s,
            ),
            trainer.device,
        )
        slowest, warning = self.stragglers.see([*map(OwnTime, works_s, ran)], steps)
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
            spikes=trainer.progress.spikes.spikes,
            rollbacks=trainer.progress.spikes.rollbacks,
            skipped_steps=trainer.skipped_steps,
            slowest_rank=None if slowest is None else slowest.rank,
            slowest_ratio=None if slowest is None else slowest.ratio,
        )
        return line, warning

    def save(self, losses: Mapping[str, float] | None, *, is_last: bool, exports: bool) -> None:
        """Saves a checkpoint, and exports it if the recipe asks for that."""
        path, wanted, then = (
            checkpoint_path(self.checkpoints, self.trainer.step),
            self.recipe.checkpoint.export,
            None,
        )
        if exports and (wanted == "all" or (wanted == "last" and is_last)):
            then = partial(export_saved, self.recipe, path, self.run_dir / "export" / path.name)
        val_loss = None if losses is None else losses.get(VALIDATION)
        state, progress = state_of(self.trainer, val_loss)
        self.saver.save(state, progress, path, to_yaml(self.recipe), is_last=is_last, then=then)

    def roll_back(self, spike: str) -> bool:
        """Goes back to the newest checkpoint from before the steps that are suspected of the spike,
        or else to the oldest, and leaves out the sequences of the steps from there. Saves the
        checkpoint again, so that a resumed run leaves them out too. Returns False, with nothing
        done, if there is no checkpoint yet."""
        trainer, before, left_out = self.trainer, self.trainer.progress, self.trainer.left_out
        self.saver.finish()
        newest_first = of_rank_0(list_checkpoints(self.checkpoints)[::-1])
        if not newest_first:
            self.progress.say("there is no checkpoint yet to go back to, so the run goes on")
            return False
        last_innocent = max(0, before.step - self.recipe.train.spike_steps)
        old_enough = [path for path in newest_first if step_of(path) <= last_innocent]
        loaded, lines = resume_from(trainer, old_enough or newest_first[-1:], self.checkpoints)
        first = self.recipe.batch_sizes.before(max(last_innocent, trainer.step))
        suspects = left_out.span(first, self.recipe.batch_sizes.before(before.step))
        trainer.update_progress(
            skipped_by_rollbacks=SkippedRanges.merge(
                (*before.skipped_by_rollbacks, suspects)
            ).ranges,
            spikes=replace(
                before.spikes,  # the counts of the run, with the steps of the checkpoint
                losses=loaded.spikes.losses,
                grad_norms=loaded.spikes.grad_norms,
                rollbacks=before.spikes.rollbacks + 1,
            ),
        )
        self.progress.say(
            f"goes back, and leaves out the sequences {suspects.first} to {suspects.last}"
        )
        for line in lines:
            self.progress.say(line)
        state, progress = state_of(trainer, loaded.val_loss)
        path = checkpoint_path(self.checkpoints, trainer.step)
        self.saver.save(state, progress, path, to_yaml(self.recipe), is_last=False)
        self.forget_undone_steps(spike)
        return True

    def forget_undone_steps(self, spike: str) -> None:
        """Takes back what was measured and reported of the steps after the trainer's."""
        step = self.trainer.step
        self.reported_tokens = self.trainer.tokens
        for clock in (self.clocks.whole, self.clocks.data, self.clocks.work):
            clock.read()
        if self.metrics_file is not None:
            self.metrics_file.go_back(step)
            self.callbacks.tell_of_a_rollback(step, spike, self.metrics_file.history)
        self.progress.step_done(step)

    def _tell_saved(self, path: Path) -> None:
        self.callbacks.tell("saved", self.trainer.step, path)


@contextmanager
def garbage_collected(every: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step. It collects Python's garbage after each `every`
    steps, and Python itself does not, so that all ranks pause in the same steps, not each in
    another. None: Python collects as always."""
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


def export_saved(
    recipe: Recipe, checkpoint: Path, to: Path, group: dist.ProcessGroup | None
) -> str:
    """Writes the model of a checkpoint as a folder that transformers opens, and returns a line for
    the user. Rank 0 writes, and tells the others after each tensor that it goes on, so that none
    waits for longer than a tensor takes. Every rank of the group calls it; an error is raised on
    all of them."""
    form = ExportForm.from_recipe(recipe)
    written: Iterator[str] = (
        export(checkpoint, to, form, overwrite=True) if dist.get_rank() == 0 else iter(())
    )
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


def _largest(
    numbers: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[int]:
    """Returns the largest that any rank of the group has of each number; every rank calls it."""
    found = torch.tensor([float(number) for number in numbers], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in found.tolist()]


def _from_all_ranks(numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """Returns each of the numbers from all ranks."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    gathered = own.new_empty(dist.get_world_size() * len(numbers))
    all_gather_single(gathered, own)
    return gathered.view(-1, len(numbers)).t().tolist()


def is_due(every: int | None, step: int, is_last: bool = False) -> bool:
    """True after each `every` steps and after the last one; never if `every` is None."""
    return every is not None and (is_last or step % every == 0)

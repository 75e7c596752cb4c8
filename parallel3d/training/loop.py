"""Training loop: training steps, and the validation, metrics and checkpoints between them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.checkpoint.collectives import collect as collect_from_all
from parallel3d.checkpoint.saver import Saver
from parallel3d.checkpoint.store import checkpoint_path, list_checkpoints, set_aside, step_of
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import Batch, BatchLoader, EvaluationSet, batches_ahead
from parallel3d.data.order import SkippedRanges
from parallel3d.errors import CtrlCError, PreemptedError
from parallel3d.export import ExportForm, export
from parallel3d.launch.signals import StopRequest, signal_name
from parallel3d.reporting.metrics import MetricsFile, StepMetrics
from parallel3d.reporting.profiler import ProfilerWindow
from parallel3d.reporting.progress import ProgressDisplay
from parallel3d.torch_private import limit_waits
from parallel3d.training.callbacks import VALIDATION, Callbacks
from parallel3d.training.rank_metrics import RankMetrics
from parallel3d.training.state import of_rank_0, resume_from, state_of
from parallel3d.training.step_result import StepResult
from parallel3d.training.timeline import traced_step
from parallel3d.training.trainer import Trainer
from parallel3d.watch import heartbeat
from parallel3d.watch.heartbeat import phase
from parallel3d.watch.step_clock import CLOCK, Cause, timed


@dataclass
class TrainingLoop:
    """Runs the training steps and the work between them. There is one on each rank.

    Args:
        trainer: Trainer of the run.
        loaders: Batches of this data-parallel rank, for training and for each evaluation set.
        checkpoints: Folder for the checkpoints of the run. Its parent is the run folder.
        metrics_file: Metrics file on rank 0, None elsewhere.
        progress: Progress display.
        stop: Requests to stop or save, made by signals.
        callbacks: User callbacks, only on rank 0.
        peak_tokens_per_s: Tokens per second of one device at peak FLOP/s, for the MFU. None: the
            MFU is not reported.
    """

    trainer: Trainer
    loaders: tuple[BatchLoader, Sequence[EvaluationSet]]
    checkpoints: Path
    metrics_file: MetricsFile | None
    progress: ProgressDisplay
    stop: StopRequest
    callbacks: Callbacks
    peak_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        self.recipe = self.trainer.recipe
        self.run_dir = self.checkpoints.parent
        self.rank_metrics = RankMetrics(self.trainer)
        self.start_report()
        self.is_first_step = True  # Until this process completes a step.
        folder = self.run_dir / "profile"
        self.profiler = ProfilerWindow(
            self.recipe.logging, folder, dist.get_rank(), self.progress.say
        )
        saved = partial(self.callbacks.tell, "saved")
        self.saver = Saver(self.recipe.checkpoint, saved=saved, say=self.progress.say)

    def fit(self) -> None:
        """Trains until the last step of the recipe or until a callback asks to stop.

        Raises:
            PreemptedError: A rank received a signal to stop. The run was saved.
            NonFiniteError: A loss or gradient is not finite, or spikes persist.
            SaveError: A checkpoint cannot be written.
            DataError: A batch is invalid.
            ReplicaError: Replicas differ.
        """
        with self.callbacks, self.profiler, self.saver:
            is_done = self.trainer.step >= self.recipe.train.steps
            while not is_done:
                is_done = self.train()

    def train(self) -> bool:
        """Trains until the run is complete and returns True. Returns False after a rollback."""
        train = self.recipe.train
        steps = range(self.trainer.step, train.steps)
        loader = replace(self.loaders[0], skipped=self.trainer.skipped_ranges)
        with closing(batches_ahead(loader, steps, self.trainer.device)) as batches:
            while True:
                result = self.train_step(batches)
                if train.on_spike == "rollback" and result.spike and self.roll_back():
                    return False
                if self.step_done(result):
                    return True

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Runs the next step, timed and profiled, and compares replicas if due."""
        step = self.trainer.step + 1
        with self.measured(), self.profiler.step(step):
            with phase("data"), timed("data"):
                batch = next(batches)
            with phase("forward or backward"):
                if step == self.recipe.logging.timeline:
                    result = traced_step(self.trainer, batch, self.run_dir, self.progress.say)
                else:
                    is_asked_to_stop = any(self.own_requests)
                    result = self.trainer.train_step(batch, is_asked_to_stop=is_asked_to_stop)
        # Kernels are loaded and ranks are connected now, so a longer wait means a hang.
        if self.is_first_step:
            limit_waits(self.recipe.train.timeout_s)
            self.is_first_step = False
        if is_due(self.recipe.train.compare_replicas_every, step):
            self.trainer.compare_replicas(f"step {step}")
        heartbeat.step_done(step)
        if warning := result.skip_reason or result.spike:
            self.progress.say(f"warning: {warning}")
        return result

    def step_done(self, result: StepResult) -> bool:
        """Reports the step, then evaluates and saves if due. Returns True after the last step.

        Raises PreemptedError if a signal asked to stop the run before its last step.
        """
        step = self.trainer.step
        steps = self.recipe.train.steps
        self.callbacks.run.step = step
        signum, wants_save, is_stopped = self.receive_requests(result)
        self.saver.step_done()
        is_early = is_stopped and not signum and step < steps
        is_last = step == steps or is_early
        if is_early:  # The run ends here, so the replicas of local SGD must be synchronized.
            self.trainer.outer_loop.after_step(step, is_last=True)
            self.trainer.engine.publish()
        self.progress.step_done(step)
        self.callbacks.tell("step_done", result)
        losses: dict[str, float] = {}
        if is_due(self.recipe.train.eval_every, step, is_last):
            losses = self.evaluate()
        if losses or step == 1 or is_due(self.recipe.logging.every, step, is_last):
            with phase("metrics"):
                self.report(result, losses)
        is_on_time = is_due(self.recipe.checkpoint.every, step, is_last)
        if is_on_time or signum or wants_save:
            exports = is_last or (is_on_time and not signum)
            with phase("save"), self.measured("checkpoint"):
                self.save(is_last=is_last or signum > 0, exports=exports)
        if signum:
            self.stop.is_answered()
        if is_early:
            self.progress.say(f"stopped after step {step}: {self.callbacks.run.stop_reason}")
        elif signum and not is_last:
            error = CtrlCError if signum == signal.SIGINT else PreemptedError
            path = checkpoint_path(self.checkpoints, step)
            raise error(
                f"stopped by {signal_name(signum)} after step {step}, saved: {path}; "
                "resume with checkpoint.resume=auto"
            )
        elif wants_save and not is_last:
            self.progress.say(f"SIGUSR1: saving after step {step}, then continuing")
        return is_last

    @property
    def own_requests(self) -> list[int]:
        """This rank's requests: number of the stop signal or 0, and three flags.

        The flags are a save (SIGUSR1), a stop by a callback, and a failed save that ends the run.
        """
        wants_end = self.callbacks.run.stop_reason is not None
        return [self.stop.signum, self.stop.wants_save, wants_end, self.saver.has_failed]

    def receive_requests(self, result: StepResult) -> tuple[int, bool, bool]:
        """Combines the requests of all ranks: stop signal or 0, save, stop by a callback.

        Raises on all ranks if a failed save of any rank ends the run.
        """
        if not result.is_asked_to_stop:
            return 0, False, False
        own = self.own_requests
        self.stop.wants_save = False
        # SIGTERM has a larger number than SIGINT and SIGHUP, so it takes precedence.
        signum, wants_save, wants_end, has_failed = self.largest(own)
        if has_failed:
            self.saver.finish()  # Raises the error on all ranks.
        return int(signum), wants_save > 0, wants_end > 0

    def largest(self, own: Sequence[float]) -> list[float]:
        """Returns the element-wise maximum over all ranks. Collective."""
        numbers = torch.tensor(own, dtype=torch.float64, device=self.trainer.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def evaluate(self) -> dict[str, float]:
        """Returns the loss of each evaluation set by name. Collective."""
        losses = {}
        with phase("evaluation"):
            for each in self.loaders[1]:
                losses[each.name] = self.trainer.evaluate(each.batches)
        val_loss = losses.get(VALIDATION, math.inf)
        if math.isfinite(val_loss):
            self.trainer.progress = replace(self.trainer.progress, val_loss=val_loss)
        self.callbacks.tell("evaluated", losses)
        return losses

    def start_report(self) -> None:
        """Starts a new metrics interval."""
        progress = self.trainer.progress
        self.reported_step = progress.step
        self.reported_tokens = progress.tokens
        self.steps_s = 0.0
        CLOCK.take()

    @contextmanager
    def measured(self, cause: Cause = "other") -> Iterator[None]:
        """Context manager whose time counts as step time, for `cause` unless `timed` says more."""
        start_s = time.perf_counter()
        with CLOCK.running(cause):
            yield
        CLOCK.settle()
        self.steps_s += time.perf_counter() - start_s

    def report(self, result: StepResult, losses: Mapping[str, float]) -> None:
        """Writes and prints the metrics since the previous report. Collective.

        `losses` are those of the evaluation sets. It is empty if the step was not evaluated.
        """
        progress = self.trainer.progress
        sets = dict(losses)
        steps = progress.step - self.reported_step
        figures = self.rank_metrics.collect(steps, self.steps_s)
        tokens_per_step = (progress.tokens - self.reported_tokens) / steps
        tokens_per_s = tokens_per_step / figures["step_time_s"]
        per_device = tokens_per_s / self.recipe.parallel.world_size
        line = StepMetrics(
            step=progress.step,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=per_device,
            mfu=None if self.peak_tokens_per_s is None else per_device / self.peak_tokens_per_s,
            val_loss=sets.pop(VALIDATION, None),
            set_losses=sets,
            loss_scale=result.loss_scale,
            spikes=progress.spikes.spikes,
            rollbacks=progress.spikes.rollbacks,
            skipped_steps=progress.skipped_steps,
            experts=result.expert_load._asdict() if result.expert_load else {},
            **figures,
        )
        self.start_report()
        self.progress.measured(line)
        if self.metrics_file is not None:
            self.metrics_file.write(line)
        self.callbacks.tell("measured", line)

    def save(self, *, is_last: bool, exports: bool) -> None:
        """Saves a checkpoint. If `exports` is True, also exports it as `checkpoint.export` says."""
        path = checkpoint_path(self.checkpoints, self.trainer.step)
        then = None
        wanted = self.recipe.checkpoint.export
        if exports and (wanted == "all" or (wanted == "last" and is_last)):
            then = partial(export_saved, self.recipe, path, self.run_dir / "export" / path.name)
        state, progress = state_of(self.trainer)
        self.saver.save(state, progress, path, to_yaml(self.recipe), is_last=is_last, then=then)

    def roll_back(self) -> bool:
        """Rolls back to a checkpoint before a spike and skips the suspected sequences.

        Loads the newest checkpoint that precedes the suspected steps (the last
        `train.spike_steps`), or the oldest one if there is none. The skipped sequences begin with
        the first suspected step or the checkpoint, whichever is later. The checkpoint is saved
        again so that a resumed run skips them too. Returns False without any change if there is no
        checkpoint yet.
        """
        trainer = self.trainer
        before = self.trainer.progress
        earlier = self.trainer.skipped_ranges
        self.saver.finish()
        newest_first = of_rank_0(list_checkpoints(self.checkpoints)[::-1])
        if not newest_first:
            self.progress.say("no checkpoint to roll back to yet; the run continues")
            return False
        last_innocent = max(0, before.step - self.recipe.train.spike_steps)
        old_enough = [path for path in newest_first if step_of(path) <= last_innocent]
        lines = resume_from(trainer, old_enough or newest_first[-1:], self.checkpoints)
        loaded = trainer.progress
        self.callbacks.run.step = trainer.step
        sequences_before = self.recipe.batch_sizes.before
        first = sequences_before(max(last_innocent, trainer.step))
        suspects = earlier.span(first, sequences_before(before.step))
        skipped = SkippedRanges.merge((*before.skipped_by_rollbacks, suspects))
        spikes = replace(
            # Keeps the counts, but takes the history of losses and norms from the checkpoint.
            before.spikes,
            losses=loaded.spikes.losses,
            grad_norms=loaded.spikes.grad_norms,
            rollbacks=before.spikes.rollbacks + 1,
        )
        trainer.progress = replace(loaded, skipped_by_rollbacks=skipped.ranges, spikes=spikes)
        told = f"rolling back; skipping sequences {suspects.first} to {suspects.last}"
        for line in (told, *lines):
            self.progress.say(line)
        self.save(is_last=False, exports=False)
        self.start_report()
        if self.metrics_file is not None:
            self.metrics_file.go_back(trainer.step)
        self.progress.step_done(trainer.step)
        return True


def export_saved(
    recipe: Recipe, checkpoint: Path, to: Path, group: dist.ProcessGroup | None
) -> str:
    """Exports a checkpoint to a Hugging Face folder. Returns a line for the user. Collective.

    Rank 0 writes. All ranks synchronize after each tensor, so that no collective times out
    meanwhile. An error is raised on all ranks.
    """
    form = ExportForm.from_recipe(recipe)
    written: Iterator[str] = iter(())
    if dist.get_rank() == 0:
        if to.exists():  # This step was exported before the run went back to an older checkpoint.
            set_aside(to, "abandoned")
        written = export(checkpoint, to, form)
    while collect_from_all(lambda: next(written, None), itemgetter(0), group):
        pass
    return "; ".join((f"exported: {to}", *form.notes))


def is_due(every: int | None, step: int, is_last: bool = False) -> bool:
    """Returns True if `step` is a multiple of `every` or the last. Always False for None."""
    return every is not None and (is_last or step % every == 0)
